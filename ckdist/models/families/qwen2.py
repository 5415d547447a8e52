"""Qwen 2 and 2.5, and MiMo-7B: Llama with biases on queries, keys and values."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.families import family, llama
from ckdist.models.families.family import Family, Fields, GgufReader, GgufWriter
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, LayerSpec, ModelSpec

KEYS = llama.KEYS.but(
    defaults={
        "max_position_embeddings": 32768, "max_window_layers": 28, "num_key_value_heads": 32, "sliding_window": 4096,
    },
    nulls={"num_key_value_heads": None, "sliding_window": None},
    only={"use_mrope": False},
    unused=("attention_bias",),  # queries, keys and values always have biases
)  # fmt: skip


def model(f: Fields, outer: Fields, n: Sizes, attention: Attention) -> ModelSpec:
    """Reads a config.json. If it enables windows, all layers after the first `max_window_layers` have one."""
    ropes, window = from_config.rotations(f, n), from_config.window(f) * f.flag("use_sliding_window")
    first = f.integer("max_window_layers", low=0)
    sliding = from_config.sliding_layers(f, n.num_layers, [i >= first for i in range(n.num_layers)])
    slide = replace(attention, window=window, rope="local" if "local" in ropes and window else "global")
    ffn = from_config.dense(f)
    return from_config.model(f, outer, n, [LayerSpec(slide if slides else attention, ffn) for slides in sliding], ropes)


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    return model(f, outer, n, n.attention(qkv_bias=True))


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(),
    to_gguf=GgufWriter(windows="use_sliding_window to false"),
    gguf_names=family.GGUF,
)

"""Mistral: Llama with a sliding window. Its GGUF architecture is llama."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.families import llama
from ckdist.models.families.family import Fields, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = llama.KEYS.but(
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    nulls={"num_key_value_heads": None, "sliding_window": None},
)


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    layer = LayerSpec(n.attention(window=from_config.window(f)), from_config.dense(f))
    return from_config.model(f, outer, n, [layer] * n.num_layers)


FAMILY = replace(
    llama.FAMILY,
    keys=KEYS,
    gguf="llama",
    from_config=config,
    from_gguf=None,
    to_gguf=GgufWriter(rotated=True, factors=True, windows="sliding_window to null"),
)

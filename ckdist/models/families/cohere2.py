"""Command R7B and Command A (Cohere 2): attention and feed-forward of the same norm. Three of four layers slide.

Sliding layers rotate, full layers do not. The norm is a layer norm without bias.
"""

from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec, Norms

PERIOD = 4
NORMS = Norms(before_ffn=None)
KEYS = ConfigKeys(
    {
        **sizes(hidden=8192, ffn=22528, layers=40, heads=64, positions=8192, vocab=256000),
        "hidden_act": "silu", "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 1e4, "sliding_window": 4096,
        "sliding_window_pattern": PERIOD, "tie_word_embeddings": True,
    },
    nulls={"sliding_window": None, "num_key_value_heads": None},
    only={"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
          "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False,
          "use_qk_norm": False},
    unused=("layer_switch", "head_dim", "use_embedding_sharing"),
)  # fmt: skip


def layers(attention: Attention, window: int, ffn: DenseFfn, sliding: list[bool]) -> list[LayerSpec]:
    """The layers: sliding ones with a window and a rotation, the others without."""
    kinds = {True: replace(attention, window=window), False: replace(attention, rope=None)}
    return [LayerSpec(kinds[slides], ffn, NORMS, parallel=True) for slides in sliding]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f, "layer_norm_eps")
    n = replace(n, head_dim=n.hidden_size // n.num_heads)  # as transformers
    if not n.head_dim:
        raise f.error("hidden_size", n.hidden_size, f"at least num_attention_heads, {n.num_heads}")
    sliding = from_config.sliding_layers(f, n.num_layers, f.integer("sliding_window_pattern"))
    made = layers(from_config.attention(f, n), from_config.window(f), from_config.dense(f), sliding)
    ropes, scale = from_config.rotations(f, n, interleaved=True), f.number("logit_scale", high=1e6)
    return from_config.model(f, outer, n, made, ropes, norm="layer", logit_scale=scale)


def gguf(header: GgufHeader) -> ModelSpec:
    f, n = header.fields, header.sizes("attention.layer_norm_epsilon")
    sliding = header.sliding_layers(n.num_layers, PERIOD)
    window = f.integer("attention.sliding_window", 4096, low=0)
    made = layers(header.attention(n), window, header.dense(), sliding)
    ropes = {"global": header.rotation(n, interleaved=True)}
    scale = f.number("logit_scale", 1.0, high=1e6)
    return header.model(n, made, ropes, norm="layer", logit_scale=scale)


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError for other layers without a window than GGUF readers know."""
    windows = [mixer.window for mixer in spec.mixers(Attention)]
    if [window > 0 for window in windows] != from_config.periodic(len(windows), PERIOD):
        raise ArchitectureError(
            f"{where}: cohere2 with other layers without a window than each fourth has no GGUF form"
        )
    return {
        "attention.layer_norm_epsilon": float(spec.norm_eps),
        "attention.sliding_window": max(windows),
        "logit_scale": float(spec.logit_scale),
        "rope.dimension_count": spec.ropes["global"].dims,
    }


FAMILY = Family(keys=KEYS, from_config=config, from_gguf=gguf, to_gguf=GgufWriter(written), gguf_names=family.GGUF)

"""Qwen 3: Qwen 2 with a norm per head of queries and keys in place of biases."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.families import family, qwen2
from ckdist.models.families.family import Family, Fields, ModelSpec

NAME = "qwen3"
KEYS = replace(qwen2.KEYS.but(defaults={"head_dim": 128}), unused=())


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    ropes, bias = from_config.rotations(f, n), f.flag("attention_bias")
    attention = n.attention(qkv_bias=bias, o_bias=bias, qk_norm="head")
    return n.model(NAME, qwen2.layers(f, n, attention, "local" in ropes), ropes, from_config.tied(f, outer))


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=qwen2.FAMILY.from_gguf,
    to_gguf=qwen2.FAMILY.to_gguf,
    gguf_names=family.GGUF,
    ignored=(*family.ROTATIONS, r"cls\.output\.weight"),  # stored_ranking.py reads it
)

"""Qwen 3: Qwen 2 with a norm per head of queries and keys in place of biases."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.families import family, qwen2
from ckdist.models.families.family import Fields
from ckdist.models.spec import ModelSpec

KEYS = replace(qwen2.KEYS.but(defaults={"head_dim": 128}), unused=())


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    return qwen2.model(f, outer, n, from_config.attention(f, n, qk_norm="head"))


FAMILY = replace(
    qwen2.FAMILY,
    keys=KEYS,
    from_config=config,
    ignored=(*family.ROTATIONS, r"cls\.output\.weight"),  # stored_ranking.py reads it
)

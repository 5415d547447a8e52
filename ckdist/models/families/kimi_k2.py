"""Kimi-K2, K2-Thinking and the text part of K2.5: DeepSeek-V3 in other sizes. Their GGUF architecture is deepseek2."""

from dataclasses import replace

from ckdist.models.families import deepseek_v2, deepseek_v3
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec

NAME = "kimi_k2"


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json. For K2.5, only its text part."""
    return deepseek_v2.model(NAME, f, outer, deepseek_v3.ROUTING)


FAMILY = replace(
    deepseek_v3.FAMILY,
    from_config=config,
)

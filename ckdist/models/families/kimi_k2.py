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
    name=NAME,
    architectures=("KimiK2ForCausalLM", "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
    model_types=("kimi_k2", "kimi_k25"),
    from_config=config,
)

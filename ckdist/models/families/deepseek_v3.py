"""DeepSeek-V3, V3.1 and R1: V2 with another router. GGUF files say deepseek2."""

from dataclasses import replace

from ckdist.models.families import deepseek_v2
from ckdist.models.fields import Fields
from ckdist.models.from_config import ConfigDefaults
from ckdist.models.spec import ModelSpec

NAME = "deepseek_v3"
DEFAULTS = ConfigDefaults(max_position=4096)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """From config.json."""
    return deepseek_v2.model(NAME, f, outer, DEFAULTS, 1536)


FAMILY = replace(
    deepseek_v2.FAMILY,
    name=NAME,
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    from_config=config,
    from_gguf=None,
)

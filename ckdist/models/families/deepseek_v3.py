"""DeepSeek-V3, V3.1 and R1: V2 with another router. GGUF files say deepseek2."""

from dataclasses import replace

from ckdist.models.families import deepseek_v2
from ckdist.models.fields import Fields
from ckdist.models.from_config import ConfigDefaults
from ckdist.models.spec import ModelSpec
from ckdist.program.routing import Routing

NAME = "deepseek_v3"
DEFAULTS = ConfigDefaults(max_position=4096)
ROUTING = Routing(used=8, scores="sigmoid", scale=2.5, groups=8, top_groups=4)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """From config.json."""
    return deepseek_v2.model(NAME, f, outer, DEFAULTS, ROUTING)


FAMILY = replace(
    deepseek_v2.FAMILY,
    name=NAME,
    architectures=("DeepseekV3ForCausalLM",),
    model_types=("deepseek_v3",),
    from_config=config,
    from_gguf=None,
)

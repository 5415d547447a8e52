"""GLM-4.7-Flash: DeepSeek-V3 in other sizes, with all experts in one group. Its GGUF architecture is deepseek2.

Layers that predict further tokens (MTP) are left out.
"""

from dataclasses import replace

from ckdist.models import limits
from ckdist.models.families import deepseek_v2, deepseek_v3
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec
from ckdist.program.routing import Routing

NAME = "glm4_moe_lite"
KEYS = deepseek_v3.KEYS.but(
    defaults={
        "first_k_dense_replace": 1, "max_position_embeddings": 202752, "n_group": 1, "num_experts_per_tok": 4,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8,
        "topk_group": 1, "v_head_dim": 256,
    },
)  # fmt: skip
ROUTING = Routing(used=4, scores="sigmoid", scale=1.8)


def dense_layers(f: Fields) -> int:
    """Reads the number of first layers without experts: first_k_dense_replace, or mlp_layer_types of newer files."""
    dense, types = f.integer("first_k_dense_replace", low=0, high=limits.MAX_LAYERS), f.raw("mlp_layer_types")
    if types is None:
        return dense
    count = f.integer("num_hidden_layers", high=limits.MAX_LAYERS)
    if types not in [["dense"] * first + ["sparse"] * (count - first) for first in range(count + 1)]:
        raise f.error("mlp_layer_types", types, f"a list of {count}, first dense ones and then sparse ones")
    return types.count("dense")


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    return deepseek_v2.model(NAME, f, outer, ROUTING, dense_layers(f))


FAMILY = replace(deepseek_v3.FAMILY, keys=KEYS, from_config=config)

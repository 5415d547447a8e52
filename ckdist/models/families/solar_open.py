"""Solar Open: GLM-4.5's layers with whole heads rotated, all with experts. Its GGUF architecture is glm4moe."""

from dataclasses import replace

from ckdist.models.config_keys import sizes
from ckdist.models.families import glm4moe
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec

KEYS = glm4moe.KEYS.but(
    defaults={
        **sizes(hidden=4096, layers=48, heads=64, head=128, vocab=196608),
        "first_k_dense_replace": 0, "moe_intermediate_size": 1280, "n_routed_experts": 128,
        "partial_rotary_factor": 1.0, "rope_theta": 1e6,
    },
    only={"use_qk_norm": False},
    unused=("intermediate_size",),  # of dense layers, which it does not have
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    if first := f.integer("first_k_dense_replace", low=0):
        raise f.error("first_k_dense_replace", first, "0: all layers have experts")
    return glm4moe.config(f, outer)


FAMILY = replace(glm4moe.FAMILY, keys=KEYS, gguf="glm4moe", from_config=config, from_gguf=None)

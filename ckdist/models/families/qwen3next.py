"""Qwen3-Next: like Qwen 3.5 with experts, in all layers or in some.

Its files group the projections of linear attention by key head. GGUF keeps the order of value heads.
"""

from dataclasses import replace

import numpy as np

from ckdist.models.config_keys import sizes
from ckdist.models.families import family, qwen2moe, qwen3moe, qwen35, qwen35moe
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter, in_layers
from ckdist.models.spec import ModelSpec
from ckdist.models.state_mixers import GatedDeltaNet
from ckdist.program.routing import Routing

KEYS = qwen35moe.KEYS.but(
    defaults={
        **sizes(ffn=5632, layers=48, vocab=151936),
        "decoder_sparse_step": 1, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10,
    }
)  # fmt: skip
QKVZ = (*qwen35.QKV, "linear_attn.in_proj_z")
BA = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")


def config(f: Fields, outer: Fields) -> ModelSpec:
    routing = Routing(used=10, renormalise=f.flag("norm_topk_prob"))
    return qwen35.model(f, outer, lambda count: qwen3moe.feed_forwards(f, count, lambda: qwen2moe.experts(f, routing)))


def gguf(header: GgufHeader) -> ModelSpec:
    return qwen35moe.gguf(header, tiled=False)


def gguf_values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF."""
    if ".linear_attn." not in weight:
        return values
    return qwen35.hybrid_values(spec.mixers(GatedDeltaNet)[0], weight.split(".", 3)[-1], values)


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(qwen35.hybrid_metadata, ("expert_shared_feed_forward_length",)),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers(
        {
            "self_attn.q_proj": qwen35.GATED_QUERY,
            "linear_attn.in_proj_qkvz": QKVZ,
            "linear_attn.in_proj_ba": BA,
            "linear_attn.conv1d": qwen35.CONV,
        },
        qwen35.GATED,
        qwen35.PLUS_ONE,
        (r".*linear_attn\.in_proj_(qkvz|ba)\.\w+", "joined"),
    ),
    # ssm_in is of older files: queries, keys, values and gates in one tensor. Writing uses the rules after it.
    gguf_names=replace(qwen35.GGUF, rules=in_layers("blk", {"ssm_in": QKVZ}))
    .but({**qwen35.GGUF.rules, **family.EXPERTS}, (r".*\bssm_(in|ba)\.\w+", "joined"))
    .but_in_layers({"ssm_beta": (), "ssm_alpha": (), "ssm_ba": BA}),
    gguf_values=gguf_values,
)

"""Qwen3-Next: like Qwen 3.5 with experts, in all layers or in some.

Its files group the projections of linear attention by key head. GGUF keeps the order of value heads.
"""

from dataclasses import replace

import numpy as np

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, qwen2moe, qwen3moe, qwen35, qwen35moe
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter, in_layers
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.models.state_mixers import GatedDeltaNet
from ckdist.program.routing import Routing

NAME = "qwen3next"
KEYS = qwen35moe.KEYS.but(
    defaults={
        **sizes(ffn=5632, layers=48, vocab=151936),
        "decoder_sparse_step": 1, "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10,
    }
)  # fmt: skip
ROUTING = Routing(used=10)
QKVZ = (*qwen35.QKV, "linear_attn.in_proj_z")
BA = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    routing = replace(ROUTING, renormalise=f.flag("norm_topk_prob"))
    ffns = qwen3moe.feed_forwards(f, n.num_layers, lambda: qwen2moe.experts(f, routing))
    layers = [LayerSpec(mixer, ffn) for mixer, ffn in zip(qwen35.mixers(f, n), ffns, strict=True)]
    ropes = from_config.rotations(f, n, from_config.part(f))
    return n.model(NAME, layers, ropes, from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    return qwen35moe.gguf(header, NAME, ROUTING, tiled=False)


def gguf_values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF."""
    mixer = spec.layers[int(weight.split(".")[2])].mixer if ".layers." in weight else None
    name = weight.split(".", 3)[-1]
    return qwen35.hybrid_values(mixer, name, values) if isinstance(mixer, GatedDeltaNet) else values


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

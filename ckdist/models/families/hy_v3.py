"""Hy3: GLM-4.5's layers with whole heads rotated and norms of heads."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, glm4moe
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

KEYS = glm4moe.KEYS.but(
    defaults={
        **sizes(hidden=4096, ffn=13312, layers=80, heads=64, head=128, vocab=120832),
        "moe_intermediate_size": 1536, "num_experts": 192, "partial_rotary_factor": None, "rope_theta": 11158840.0,
        "routed_scaling_factor": 2.826,
    },
    aliases={
        "expert_hidden_dim": "moe_intermediate_size",
        "num_local_experts": "num_experts",
        "num_shared_experts": "n_shared_experts",
        "route_norm": "norm_topk_prob",
        "router_scaling_factor": "routed_scaling_factor",
    },
    only={"moe_router_enable_expert_bias": True, "moe_router_use_sigmoid": True, "qk_norm": True},
    unused=("enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"),
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    attention = from_config.attention(f, n, qk_norm="head")
    layers = [LayerSpec(attention, ffn) for ffn in glm4moe.feed_forwards(f, n.num_layers, "num_experts")]
    return from_config.model(f, outer, n, layers)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. A converted file does not say how many layers are dense."""
    name = "leading_dense_block_count"
    dense = sum(tensor.endswith(".ffn_gate.weight") for tensor in header.dims)
    return glm4moe.gguf(header if header.fields.has(name) else header.but({name: dense}))


FAMILY = replace(
    glm4moe.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(experts=("expert_shared_feed_forward_length", *family.GROUPED_EXPERTS), rotated=True),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers(
        {
            **{one.replace("shared_experts", "shared_mlp"): to for one, to in family.SHARED_EXPERTS.items()},
            "mlp.router.gate": "mlp.gate",
            "mlp.expert_bias": "mlp.gate.e_score_correction.bias",
        }
    ),
    gguf_names=family.GGUF_EXPERTS.but_in_layers({"exp_probs_b": "mlp.gate.e_score_correction.bias"}),
)  # fmt: skip

"""Ling and Ring 2: GLM-4.5's layers, with queries, keys and values in one tensor. Always norms of heads.

Layers that predict further tokens (MTP) are left out.
"""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family, glm4moe
from ckdist.models.families.family import Fields, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec, MoeFfn

QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
KEYS = ConfigKeys(
    {
        **sizes(kv_heads=4, head=128, positions=32768),
        "first_k_dense_replace": 1, "hidden_act": "silu", "moe_intermediate_size": 512, "n_group": 8,
        "num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_shared_experts": 1,
        "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-6, "rope_theta": 6e5, "routed_scaling_factor": 1.0,
        "topk_group": 4, "use_qk_norm": True,
    },
    only={
        "moe_router_enable_expert_bias": True, "score_function": "sigmoid", "use_bias": False, "use_qk_norm": True,
        "use_rmsnorm": True,
    },
    unused=("max_window_layers", "mtp_loss_scaling_factor", "output_dropout", "router_dtype"),
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    attention = n.attention(qkv_bias=f.flag("use_qkv_bias"), qk_norm="head")
    ffns = glm4moe.feed_forwards(f, n.num_layers, "num_experts", "num_shared_experts")
    if isinstance(last := ffns[-1], MoeFfn):
        width = f.integer("moe_shared_expert_intermediate_size", last.shared_size, high=limits.MAX_FFN)
        if width != last.shared_size:
            needed = f"that of all shared experts, {last.shared_size}"
            raise f.error("moe_shared_expert_intermediate_size", width, needed)
    ropes = {"global": from_config.rotations(f, n, from_config.part(f))["global"]}
    return from_config.model(f, outer, n, [LayerSpec(attention, ffn) for ffn in ffns], ropes)


FAMILY = replace(
    glm4moe.FAMILY,
    keys=KEYS,
    from_config=config,
    to_gguf=GgufWriter(experts=("expert_shared_feed_forward_length", *family.GROUPED_EXPERTS), rotated=True),
    safetensors=family.SAFETENSORS_EXPERTS.but({"model.word_embeddings": "model.embed_tokens"}).but_in_layers({
        **family.SHARED_EXPERTS,
        "attention.query_key_value": QKV,
        "attention.query_layernorm": "self_attn.q_norm",
        "attention.key_layernorm": "self_attn.k_norm",
        "attention.dense": "self_attn.o_proj",
        "mlp.gate.expert_bias": "mlp.gate.e_score_correction.bias",
    }),
    gguf_names=family.GGUF_EXPERTS.but_in_layers({"attn_qkv": QKV}),
)  # fmt: skip

"""GLM-5.3-Flash: Kimi Delta Attention, latent attention to chosen windows without rotation, residual streams.

Images and the layer that predicts further tokens are left out.
"""

from dataclasses import replace

from ckdist.models import from_config, glm5_gguf, limits
from ckdist.models.compressed_gguf import HC_STORED
from ckdist.models.compressed_model import LIMIT, read_streams
from ckdist.models.families import deepseek_v2, deepseek_v3, glm_moe_dsa, kimi_linear
from ckdist.models.fields import Fields
from ckdist.models.glm5_gguf import ACTIVATION, POOL, checked, pooled_model
from ckdist.models.indexers import Indexer
from ckdist.models.spec import LatentAttention, ModelSpec

SPARSE = ("deepseek_sparse_attention", "indexed_attention", "full_attention")
KEYS = glm_moe_dsa.KEYS.but(
    defaults={
        "first_k_dense_replace": 3, "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20, "index_kpool": 16,
        "linear_conv_kernel_dim": 4, "linear_head_dim": 128, "linear_lower_bound": -5.0, "linear_num_heads": 64,
        "max_position_embeddings": 1048576, "q_lora_rank": 1536, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0,
    },
    aliases={"layer_types": "layer_types"},
    only={
        "hres_vwnstyle": True, "index_dsa_use_layernorm": True, "index_kpool_always_select_tail": True,
        "index_kpool_compress": True, "mhc": True, "mhc_no_norm_weight": False, "mla_use_nope": True,
        "hidden_act": "silu", "swiglu_limit": LIMIT,
    },
    unused=(
        "indexer_rope_interleave", "moe_router_dtype", "rope_interleave", "rope_parameters", "rope_theta",
        "image_end_token_id", "image_start_token_id", "video_end_token_id", "video_start_token_id",
    ),
)  # fmt: skip


def linear_layers(f: Fields, count: int) -> list[bool]:
    """Reads whether each layer has linear attention. Raises ModelFileError if fields disagree."""
    usual = from_config.periodic(count, 4)
    linear = from_config.layers_of_kind(f, count, usual, kimi_linear.LINEAR, *SPARSE)
    own = f.sub("linear_attn_config")
    for name, wanted in (("kda_layers", True), ("full_attn_layers", False)):  # numbers from 0 on
        given, numbers = own.raw(name), [i for i, flag in enumerate(linear) if flag == wanted]
        if given not in (None, numbers):
            raise own.error(name, given, f"{numbers}, as layer_types says")
    return linear


def config(f: Fields, outer: Fields) -> ModelSpec:
    size = lambda name, high: f.integer(name, high=high)
    f.integer("qk_rope_head_dim", low=0, high=0)
    n = from_config.sizes(f, head_dim=size("qk_nope_head_dim", limits.MAX_HEAD_DIM))
    heads, width, top_k, pool = (
        size(f"index_{name}", limits.MAX_POSITION) for name in ("n_heads", "head_dim", "topk", "kpool")
    )
    indexer = checked(Indexer(heads, width, top_k, None, pool), f, "index_", "kpool", "head_dim")
    full = LatentAttention(
        n.num_heads, size("kv_lora_rank", limits.MAX_LATENT), n.head_dim, 0, size("v_head_dim", limits.MAX_HEAD_DIM),
        n.head_dim**-0.5, size("q_lora_rank", limits.MAX_WIDTH), None, indexer=indexer,
    )  # fmt: skip
    own, linear = f.sub("linear_attn_config"), linear_layers(f, n.num_layers)
    own_index = glm_moe_dsa.indexer_layers(f)
    if not all(flag or has for flag, has in zip(linear, own_index, strict=True)):
        raise f.error("indexer_types", f.raw("indexer_types"), '"full" in all layers with latent attention')
    floor = own.number("gate_lower_bound", f.number("linear_lower_bound", low=-1e3, high=0.0), low=-1e3, high=0.0)
    net = replace(kimi_linear.delta_attention(f), decay_floor=floor if own.flag("safe_gate", True) else 0.0)
    ffns = deepseek_v2.feed_forwards(f, n.num_layers, function=ACTIVATION)
    streams = replace(read_streams(f, "hc_mult", "hc_sinkhorn_iters", "hc_eps"), mean=True)
    return pooled_model(n, [net if flag else full for flag in linear], ffns, from_config.tied(f, outer), streams)


INDEX = {f"self_attn.indexer.index_kpool_compress_{name}": f"self_attn.indexer.{part}" for name, part in POOL.items()}
FAMILY = replace(
    deepseek_v3.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=glm5_gguf.gguf,
    to_gguf=glm5_gguf.export,
    gguf_values=glm5_gguf.values,
    safetensors=deepseek_v2.SAFETENSORS.but_in_layers({**HC_STORED, **INDEX}),
    gguf_names=glm5_gguf.NAMES,
)

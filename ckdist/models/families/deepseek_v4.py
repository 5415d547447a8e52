"""DeepSeek-V4: attention to compressed entries, several residual streams, experts chosen by token ids in first layers.

DeepSeek-AI 2026. The layer that predicts further tokens is left out.
"""

from dataclasses import replace

from ckdist.models import compressed_gguf, from_config, limits, rope
from ckdist.models.compressed_fields import CompressedAttention
from ckdist.models.compressed_model import KINDS, LIMIT, SPARSE, compressed_model, read_streams
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import deepseek_v32
from ckdist.models.families.family import SAFETENSORS_EXPERTS, SHARED_EXPERTS, Family, in_layers, numbered
from ckdist.models.fields import Fields
from ckdist.models.spec import ModelSpec, RopeSpec
from ckdist.program.routing import Routing

KEYS = ConfigKeys(
    {
        "compress_rope_theta": 160000.0, "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
        "hidden_act": "silu", "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
        "max_position_embeddings": 1048576, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "num_hash_layers": 3, "num_key_value_heads": 1, "o_groups": 8,
        "o_lora_rank": 1024, "q_lora_rank": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    only={
        "hidden_act": "silu", "norm_topk_prob": True, "scoring_func": "sqrtsoftplus", "swiglu_limit": LIMIT,
        "topk_method": "noaux_tc",
    },
    unused=("compress_rates", "expert_dtype", "intermediate_size", "num_hash_layers"),  # if other fields say the same
)  # fmt: skip


def rotation(f: Fields, n: from_config.Sizes, dims: int, name: str, theta: str) -> RopeSpec:
    """The rotation of layers with entries ("compress"), or without ("main"), which only newer files can scale."""
    given, usual = f.sub("rope_parameters"), f.number(theta, low=1.0)
    own = given.sub(name) if given.has(name) else given if name == "compress" else Fields({}, f.where)
    made = rope.from_fields(own, rope.RopeShape(n.head_dim, n.max_position, usual, dims / n.head_dim, True), f)
    return replace(made, magnitude=own.number("attention_factor", 1.0, high=1e3))


def kinds(f: Fields, count: int) -> list[str]:
    """The kind of each layer's attention."""
    if (ratios := f.raw("compress_ratios")) is not None:  # those of layers that predict further tokens come last
        if not isinstance(ratios, list) or len(ratios) < count or any(ratio not in KINDS for ratio in ratios):
            raise f.error("compress_ratios", ratios, f"a list of {count} of 0, 4 and 128")
        return [KINDS[ratio] for ratio in ratios[:count]]
    usual = [KINDS[128] if i < 2 or i % 2 == 0 else SPARSE for i in range(count)]
    return from_config.layer_kinds(f, count, list(KINDS.values())) or usual


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    if n.num_kv_heads != 1:
        raise f.error("num_key_value_heads", n.num_kv_heads, "1: all heads share one key")
    size = lambda name, high: f.integer(name, high=high)
    name = "qk_rope_head_dim"
    dims = f.integer(name, n.head_dim // 8, high=n.head_dim)
    if int(n.head_dim * (part := f.number("partial_rotary_factor", dims / n.head_dim, high=1.0))) != dims:
        if f.has(name):
            raise f.error(name, dims, f"{part:g} * {n.head_dim}, as partial_rotary_factor says")
        dims = int(n.head_dim * part)
    rank, groups, o_rank = (size(name, limits.MAX_WIDTH) for name in ("q_lora_rank", "o_groups", "o_lora_rank"))
    window, rates = size("sliding_window", limits.MAX_POSITION), f.sub("compress_rates")
    plain = CompressedAttention(n.num_heads, n.head_dim, dims, rank, groups, o_rank, window, "local")
    of_kind = {KINDS[0]: plain}
    for ratio, kind in list(KINDS.items())[1:]:
        rate = rates.integer(kind, ratio, high=1 << 16)
        of_kind[kind] = replace(plain, rope="global", ratio=rate, overlap=kind == SPARSE)
    of_kind[SPARSE] = replace(of_kind[SPARSE], indexer=deepseek_v32.config_indexer(f))
    routing = Routing(6, "sqrt_softplus", scale=f.number("routed_scaling_factor", high=1e6))
    shared = f.integer("n_shared_experts", low=1, high=1) * f.integer("moe_intermediate_size", high=limits.MAX_FFN)
    more = {"correction_bias": True, "shared_size": shared}
    ffn = from_config.experts(f, "n_routed_experts", "moe_intermediate_size", routing, "clamped_silu", **more)
    given = from_config.layer_kinds(f, n.num_layers, ("hash_moe", "moe"), "mlp_layer_types")
    first = range(f.integer("num_hash_layers", low=0, high=limits.MAX_LAYERS)) if given is None else ()
    by_id = [i in first if given is None else given[i] == "hash_moe" for i in range(n.num_layers)]
    ropes = {
        "global": rotation(f, n, dims, "compress", "compress_rope_theta"),
        "local": rotation(f, n, dims, "main", "rope_theta"),
    }
    mixers = [of_kind[kind] for kind in kinds(f, n.num_layers)]
    of_streams = read_streams(f, "hc_mult", "hc_sinkhorn_iters", "hc_eps")
    return compressed_model(n, mixers, ffn, by_id, ropes, from_config.tied(f, outer), of_streams)


OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **compressed_gguf.HC_STORED,
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.norm": "self_attn.kv_norm",  # as transformers saves it
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    **compressed_gguf.windows("attn.compressor.", "self_attn.compressor", compressed_gguf.WINDOW),
    **compressed_gguf.windows("attn.indexer.compressor.", "self_attn.compressor.indexer", compressed_gguf.WINDOW),
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "ffn.gate": "mlp.gate",
    "ffn.gate.bias": "mlp.gate.e_score_correction.bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    **numbered("ffn.experts", "mlp.experts"),
    **numbered("ffn.shared_experts", "mlp.shared_expert"),
}
FAMILY = Family(
    config,
    compressed_gguf.NAMES,
    compressed_gguf.export,
    compressed_gguf.gguf,
    keys=KEYS,
    safetensors=SAFETENSORS_EXPERTS.but({
        **in_layers("model.layers", {**SHARED_EXPERTS, **OF_LAYER}),
        **{f"hc_head_{name}": f"model.hc_head.hc_{name}" for name in ("fn", "base", "scale")},
        "embed": "model.embed_tokens", "head": "lm_head",
    }),
    ignored=(r"mtp\..*",),
    gguf_values=compressed_gguf.values,
)  # fmt: skip

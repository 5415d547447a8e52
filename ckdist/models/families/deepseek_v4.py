"""DeepSeek-V4: attention to compressed entries, several residual streams, experts chosen by token ids in first layers.

DeepSeek-AI 2026. The layer that predicts further tokens is left out.
"""

from dataclasses import replace

from ckdist.models import from_config, limits, rope
from ckdist.models.compressed_fields import CompressedAttention, HyperConnections
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families.family import SAFETENSORS_EXPERTS, SHARED_EXPERTS, Family, GgufWriter, TensorNames
from ckdist.models.families.family import in_layers, numbered
from ckdist.models.fields import Fields
from ckdist.models.indexer import Indexer
from ckdist.models.spec import LayerSpec, ModelSpec, MoeFfn, RopeSpec
from ckdist.program.routing import Routing

NAME, SPARSE, HEAVY = "deepseek_v4", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS = {0: "sliding_attention", 4: SPARSE, 128: HEAVY}  # by `compress_ratios`
KEYS = ConfigKeys(
    {
        "compress_rope_theta": 160000.0,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "hidden_act": "silu",
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 512,
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "num_hash_layers": 3,
        "num_key_value_heads": 1,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "q_lora_rank": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    only={"norm_topk_prob": True, "num_key_value_heads": 1, "swiglu_limit": 10.0, "topk_method": "noaux_tc"},
    unused=("compress_rates", "expert_dtype", "intermediate_size", "num_hash_layers"),  # if other fields say the same
)


def rotation(f: Fields, n: from_config.Sizes, dims: int, name: str, theta: str) -> RopeSpec:
    """The rotation of layers with entries ("compress"), or without ("main"), which is never scaled."""
    given = f.sub("rope_parameters")
    nested = given.has(name)
    values = dict(given.sub(name).values) if nested else {**given.values, "rope_theta": f.number(theta, low=1.0)}
    if not nested and name == "main":
        values = {"rope_theta": values["rope_theta"]}
    values = {"attention_factor": 1.0, **values, "partial_rotary_factor": 1.0}
    return rope.from_fields(Fields(values, f.where), rope.RopeShape(dims, n.max_position, 1e4, None, True), f)


def kinds(f: Fields, count: int) -> list[str]:
    """The kind of each layer's attention."""
    if (ratios := f.raw("compress_ratios")) is not None:  # those of layers that predict further tokens come last
        if not isinstance(ratios, list) or len(ratios) < count or any(ratio not in KINDS for ratio in ratios):
            raise f.error("compress_ratios", ratios, f"a list of {count} of 0, 4 and 128")
        return [KINDS[ratio] for ratio in ratios[:count]]
    usual = [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(count)]
    return from_config.layer_kinds(f, count, list(KINDS.values())) or usual


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    if f.flag("attention_bias"):
        raise f.error("attention_bias", True, "false: biases of compressed attention are not supported")
    size = lambda name, high: f.integer(name, high=high)
    part = f.number("partial_rotary_factor", 64 / 512, high=1.0)
    dims = f.integer("qk_rope_head_dim", int(n.head_dim * part), high=n.head_dim)
    ranks = size("q_lora_rank", limits.MAX_WIDTH), size("o_groups", limits.MAX_HEADS), size("o_lora_rank", limits.MAX_WIDTH)
    window, rates = size("sliding_window", limits.MAX_POSITION), f.sub("compress_rates")
    plain = CompressedAttention(n.num_heads, n.head_dim, dims, *ranks, window, "local")
    of_kind = {KINDS[0]: plain}
    for ratio, kind in list(KINDS.items())[1:]:
        rate = rates.integer(kind, ratio, high=1 << 16)
        of_kind[kind] = replace(plain, rope="global", ratio=rate, overlap=kind == SPARSE)
    heads, width = size("index_n_heads", limits.MAX_HEADS), size("index_head_dim", limits.MAX_HEAD_DIM)
    indexer = Indexer(heads, width, size("index_topk", limits.MAX_POSITION))
    of_kind[SPARSE] = replace(of_kind[SPARSE], indexer=indexer)
    scores = f.text("scoring_func")
    if scores != "sqrtsoftplus":
        raise f.error("scoring_func", scores, "sqrtsoftplus")
    routing = Routing(6, "sqrt_softplus", scale=f.number("routed_scaling_factor", high=1e6))
    shared = f.integer("n_shared_experts", low=1, high=1) * f.integer("moe_intermediate_size", high=limits.MAX_FFN)
    best = from_config.experts(
        f, "n_routed_experts", "moe_intermediate_size", routing, correction_bias=True, shared_size=shared
    )
    best = replace(best, activation="clamped_silu")
    hashed = replace(best, correction_bias=False, hashed=n.vocab_size)
    given = from_config.layer_kinds(f, n.num_layers, ("hash_moe", "moe"), "mlp_layer_types")
    by_id = range(f.integer("num_hash_layers", low=0, high=limits.MAX_LAYERS)) if given is None else ()
    ffns: list[MoeFfn] = [hashed if (given[i] == "hash_moe" if given else i in by_id) else best for i in range(n.num_layers)]
    layers = [LayerSpec(of_kind[kind], ffn) for kind, ffn in zip(kinds(f, n.num_layers), ffns, strict=True)]
    ropes = {
        "global": rotation(f, n, dims, "compress", "compress_rope_theta"),
        "local": rotation(f, n, dims, "main", "rope_theta"),
    }
    streams = HyperConnections(
        f.integer("hc_mult", low=1, high=8), f.integer("hc_sinkhorn_iters", high=1000), f.number("hc_eps", high=1.0)
    )
    return n.model(NAME, layers, ropes, from_config.tied(f, outer), streams=streams)


def windows(stored: str, weights: str) -> dict[str, str]:
    """Names of what makes entries."""
    parts = {"wkv": "kv_proj", "wgate": "gate_proj", "ape": "position_bias", "norm": "kv_norm"}
    return {f"{stored}.{name}": f"{weights}.{part}" for name, part in parts.items()}


OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"hc_{part}_{name}": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.norm": "self_attn.kv_norm",  # as transformers saves it
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    **windows("attn.compressor", "self_attn.compressor"),
    **windows("attn.indexer.compressor", "self_attn.compressor.indexer"),
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
    TensorNames(),
    GgufWriter(refused="GGUF readers do not have its architecture"),
    keys=KEYS,
    safetensors=SAFETENSORS_EXPERTS.but({
        **in_layers("model.layers", {**SHARED_EXPERTS, **OF_LAYER}),
        **{f"hc_head_{name}": f"model.hc_head.hc_{name}" for name in ("fn", "base", "scale")},
        **{"embed": "model.embed_tokens", "head": "lm_head"},
    }),
    ignored=(r"mtp\..*",),
)  # fmt: skip

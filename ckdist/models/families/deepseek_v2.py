"""DeepSeek-V2 and V2-Lite: latent attention, a router with softmax. Also all GGUF files of architecture deepseek2."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits, rope_scaling
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufForm, GgufHeader
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, Ffn, LatentAttention, LayerSpec, ModelSpec, RopeSpec
from ckdist.models.stored_query_scale import gguf_query_scale
from ckdist.program.routing import Routing

GGUF = "deepseek2"
KV_B = ("self_attn.k_b_proj", "self_attn.v_b_proj")
ROUTING = Routing(used=6, renormalise=False, group_scores=1)
KEYS = ConfigKeys(
    {
        "first_k_dense_replace": 0, "hidden_act": "silu", "kv_lora_rank": 512, "max_position_embeddings": 2048,
        "n_group": 1, "n_shared_experts": 2, "norm_topk_prob": False, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_interleave": True,
        "rope_theta": 1e4, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
        "topk_method": "greedy", "v_head_dim": 128,
    },
    aliases={"num_experts": "n_routed_experts"},
    nulls={"q_lora_rank": None, "n_shared_experts": 0},
    only={"moe_layer_freq": 1},
    unused=(
        *("head_dim", "num_key_value_heads"),  # latent attention has other sizes
        "intermediate_size",  # if all layers have experts
        # n_group and topk_group if all experts are one group; the others if no layer has experts
        *("n_group", "topk_group", "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "norm_topk_prob"),
        *("num_experts_per_tok", "routed_scaling_factor", "scoring_func", "topk_method"),
    ),
)  # fmt: skip
NO_EXPERTS = {
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length"), 0),
    "expert_weights_scale": 1.0,
}
METHODS = ("greedy", "group_limited_greedy", "noaux_tc")  # topk_method
NORM_EPS = 1e-6  # for the norms of both low ranks, independent of config.json


def latent_attention(f: Fields, n: Sizes, rotation: RopeSpec) -> LatentAttention:
    """Reads the attention from a config.json. The scale includes YaRN's magnitude twice: for queries and for keys."""
    width = lambda name: f.integer(name, high=limits.MAX_HEAD_DIM)
    nope, rotated = width("qk_nope_head_dim"), width("qk_rope_head_dim")
    scaling = Fields(rotation.scaling, f.where)
    scale = (nope + rotated) ** -0.5
    if (all_dims := scaling.number("mscale_all_dim", 0.0, low=-1.0)) and scaling.has("factor"):
        scale *= rope_scaling.yarn_magnitude(scaling.number("factor"), all_dims) ** 2
    rank, q_rank = f.integer("kv_lora_rank", high=limits.MAX_LATENT), q_lora_rank(f)
    return LatentAttention(n.num_heads, rank, nope, rotated, width("v_head_dim"), scale, q_rank, norm_eps=NORM_EPS)


def q_lora_rank(f: Fields) -> int:
    """Reads the low rank of queries; 0: none."""
    return f.integer("q_lora_rank", None, high=limits.MAX_WIDTH) or 0


def model(f: Fields, outer: Fields, group_scores: int = 2) -> ModelSpec:
    """Reads a config.json. `group_scores` is that of Routing."""
    n = from_config.sizes(f, head_dim=f.integer("qk_rope_head_dim", high=limits.MAX_HEAD_DIM))
    ropes = from_config.rotations(f, n, interleaved=f.flag("rope_interleave"))
    attention, ffns = latent_attention(f, n, ropes["global"]), feed_forwards(f, n.num_layers, group_scores)
    return from_config.model(f, outer, n, [LayerSpec(attention, ffn) for ffn in ffns], ropes)


def feed_forwards(f: Fields, layers: int, group_scores: int = 2, function: str | None = None) -> Sequence[Ffn]:
    """Reads the feed-forward of each layer. `function` is that of their gates; None: the one in the file."""
    count, dense = from_config.dense_layers(f), lambda: from_config.dense(f, function)
    if count >= layers:
        return [dense()] * layers
    grouped = f.choice("topk_method", METHODS) != "greedy"
    of_groups = lambda name: f.integer(name, high=limits.MAX_EXPERTS) if grouped else 1
    routing = Routing(
        used=1,  # the file says it
        scores=f.choice("scoring_func", ("softmax", "sigmoid")),
        renormalise=f.flag("norm_topk_prob"),
        scale=f.number("routed_scaling_factor", high=1e6),
        groups=of_groups("n_group"),
        top_groups=of_groups("topk_group"),
        group_scores=group_scores,
    )
    names, size = ("n_routed_experts", "moe_intermediate_size"), f.integer("moe_intermediate_size", high=limits.MAX_FFN)
    more = {"shared_size": f.integer("n_shared_experts", low=0, high=limits.MAX_EXPERTS) * size}
    more["correction_bias"] = f.text("topk_method") == METHODS[2]
    return from_config.after_dense(dense, from_config.experts(f, *names, routing, function, **more), count, layers)


def config(f: Fields, outer: Fields) -> ModelSpec:
    return model(f, outer, group_scores=1)


def gguf(header: GgufHeader) -> ModelSpec:
    return gguf_model(header, ROUTING)


def gguf_model(header: GgufHeader, routing: Routing = family.SIGMOID, beta: float = 0.0) -> ModelSpec:
    """Reads GGUF metadata, of files with attn_kv_b, or with attn_k_b and attn_v_b.

    `routing` has the defaults of the experts; `beta` is the default of attention.temperature_scale.
    """
    f = header.fields
    rotated = f.integer("rope.dimension_count", 64, high=limits.MAX_HEAD_DIM)
    # In older files these are the widths of heads; in newer files they are the widths of cached vectors.
    suffix = "_mla" if f.has("attention.key_length_mla") else ""
    key = f.integer(f"attention.key_length{suffix}", high=limits.MAX_HEAD_DIM)
    value = f.integer(f"attention.value_length{suffix}", high=limits.MAX_HEAD_DIM)
    if key <= rotated:
        raise f.error(f"attention.key_length{suffix}", key, f"above rope.dimension_count, which is {rotated}")
    of_rotation = header.but({"attention.key_length": rotated, "attention.value_length": rotated})
    n = of_rotation.sizes()
    rotation = of_rotation.rotation(n, interleaved=True)
    scale, query_scale = key**-0.5, gguf_query_scale(f, beta)
    if multiplier := f.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0):
        magnitude = 1 + multiplier * math.log(max(1.0, f.number("rope.scaling.factor", 1.0)))
        scale *= magnitude**2 if query_scale is None else 1.0  # mistral4.py says why
        rotation = replace(rotation, magnitude=1.0)
    attention = LatentAttention(
        n.num_heads,
        f.integer("attention.kv_lora_rank", high=limits.MAX_LATENT),
        key - rotated,
        rotated,
        value,
        scale,
        0 if header.has("attn_q.weight") else f.integer("attention.q_lora_rank", high=limits.MAX_WIDTH),
        query_scale=query_scale,
    )
    if header.is_mixture():
        # Files of GLM-4.7-Flash lack expert_gating_func. Only models with sigmoids have correction biases.
        corrected = header.has_any(".exp_probs_b.bias")
        experts = header.experts(replace(routing, scores="sigmoid") if corrected else routing, shared=True)
        if experts.routing.scores == "sigmoid":
            experts = replace(experts, routing=replace(experts.routing, group_scores=2))
        ffns = header.feed_forwards(n, experts)
    else:
        ffns = [header.dense()] * n.num_layers
    return header.model(n, [LayerSpec(attention, ffn) for ffn in ffns], {"global": rotation})


def form(architecture: str, spec: ModelSpec, where: str, own: Mapping[str, Any]) -> GgufForm:
    """Returns the GGUF metadata of a model. `own` are further values.

    Raises ArchitectureError for a rotation of halves, and for YaRN with two magnitudes.
    """
    from ckdist.models import to_gguf

    a, r = spec.mixers(LatentAttention)[0], spec.ropes["global"]
    if r.scaling.get("mscale_all_dim") and r.magnitude != 1.0:
        raise ArchitectureError(f"{where}: YaRN with mscale and mscale_all_dim that differ has no GGUF form")
    if a.norm_eps not in (0.0, spec.norm_eps):
        raise ArchitectureError(
            f"{where}: rms_norm_eps {spec.norm_eps:g} has no GGUF form: readers would use it where the model has "
            f"{a.norm_eps:g}"
        )
    if not r.interleaved:
        raise ArchitectureError(f"{where}: latent attention with rope_interleave false has no GGUF form")
    cached = Attention(a.num_heads, 1, a.rope_dim, a.scale)  # has the sizes that `dense` reads
    shaped, dense = spec.with_layers(mixer=[cached] * len(spec.layers)), {"leading_dense_block_count": len(spec.layers)}
    more = {
        **(to_gguf.experts(spec, where, family.GROUPED_EXPERTS) if spec.mixtures() else NO_EXPERTS | dense),
        "attention.kv_lora_rank": a.kv_lora_rank,
        "attention.key_length": a.key_width,
        "attention.value_length": a.kv_lora_rank,
        "attention.key_length_mla": a.head_dim,
        "attention.value_length_mla": a.v_dim,
        "rope.dimension_count": a.rope_dim,
        **own,
        **({"attention.q_lora_rank": a.q_lora_rank} if a.q_lora_rank else {}),
    }
    return to_gguf.dense(architecture, shaped, where, more)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    return yarn_form(GGUF, spec, where, {})


def yarn_form(architecture: str, spec: ModelSpec, where: str, own: Mapping[str, Any]) -> GgufForm:
    """`form` with YaRN's magnitude as readers of deepseek2 expect it."""
    made = form(architecture, spec, where, own)
    if all_dims := float(spec.ropes["global"].scaling.get("mscale_all_dim") or 0.0):
        scaling = f"{architecture}.rope.scaling."
        kept = {name: value for name, value in made.metadata.items() if name != f"{scaling}attn_factor"}
        made = replace(made, metadata={**kept, f"{scaling}yarn_log_multiplier": 0.1 * all_dims})
    return made


SAFETENSORS = family.SAFETENSORS_EXPERTS.but_in_layers(
    {**family.SHARED_EXPERTS, "self_attn.kv_b_proj": KV_B},
    (r".+\.kv_b_proj\.weight", "keys_values"),
)
GGUF_NAMES = family.GGUF_EXPERTS.but_in_layers(
    {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": KV_B,
        "attn_k_b": KV_B[0],
        "attn_v_b": KV_B[1],
    },
    (r".+\.self_attn\.[kv]_b_proj\.weight", "by_head"),
    (r".+\.attn_kv_b\.weight", "keys_values"),
)

FAMILY = Family(
    keys=KEYS, from_config=config, from_gguf=gguf, to_gguf=export, safetensors=SAFETENSORS, gguf_names=GGUF_NAMES
)

"""DeepSeek-V2 and V2-Lite: latent attention, a router with softmax; and every GGUF file of architecture deepseek2."""

import math
from dataclasses import replace

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, from_gguf, limits, rope, to_gguf
from ckdist.models.families import family
from ckdist.models.families.family import Family, GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.from_config import ConfigDefaults, Sizes
from ckdist.models.spec import Attention, DenseFfn, LatentAttention, LayerSpec, ModelSpec, MoeFfn, RopeSpec
from ckdist.program.routing import Routing

NAME, GGUF = "deepseek_v2", "deepseek2"
KV_B = ("self_attn.k_b_proj", "self_attn.v_b_proj")
ROUTING = Routing(used=6, renormalise=False, group_scores=1)
METHODS = {1: "group_limited_greedy", 2: "noaux_tc"}  # by how many scores of a group count
NO_EXPERTS = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_count": 0,
    "expert_feed_forward_length": 0,
    "expert_weights_scale": 1.0,
}
NORM_EPS = 1e-6  # of both low ranks, whatever config.json says of the others


def latent_attention(f: Fields, n: Sizes, rotation: RopeSpec, q_rank: int) -> LatentAttention:
    """The attention of config.json. The scale has YaRN's magnitude twice, of queries and of keys."""
    if f.flag("attention_bias"):
        raise f.error("attention_bias", True, "false: latent attention with biases is not supported")
    width = lambda name, absent: f.integer(name, absent, high=limits.MAX_HEAD_DIM)
    nope, rotated = width("qk_nope_head_dim", 128), width("qk_rope_head_dim", 64)
    scaling = Fields(rotation.scaling, f.where)
    scale = (nope + rotated) ** -0.5
    if (all_dims := scaling.number("mscale_all_dim", 0.0, low=-1.0)) and scaling.has("factor"):
        scale *= rope.yarn_magnitude(scaling.number("factor"), all_dims) ** 2
    return LatentAttention(
        n.num_heads,
        f.integer("kv_lora_rank", 512, high=limits.MAX_LATENT),
        nope,
        rotated,
        width("v_head_dim", 128),
        scale,
        q_rank,
        norm_eps=NORM_EPS,
    )


def model(family_name: str, f: Fields, outer: Fields, defaults: ConfigDefaults, routing: Routing) -> ModelSpec:
    """From config.json; `routing`: of its experts, where it does not say."""
    rotated = f.integer("qk_rope_head_dim", 64, high=limits.MAX_HEAD_DIM)
    n = from_config.sizes(Fields({**f.values, "head_dim": rotated}, f.where, f.prefix), defaults)
    ropes = from_config.rotations(f, n, interleaved=f.flag("rope_interleave", True))
    no_low_rank = "q_lora_rank" in f.values and not f.has("q_lora_rank")
    q_rank = 0 if no_low_rank else f.integer("q_lora_rank", 1536, high=limits.MAX_WIDTH)
    attention = latent_attention(f, n, ropes["global"], q_rank)
    dense = f.integer("first_k_dense_replace", 0, low=0)
    if (step := f.integer("moe_layer_freq", 1)) != 1:
        raise f.error("moe_layer_freq", step, "1: experts in every layer behind the dense ones")
    plain = LayerSpec(attention, DenseFfn(n.intermediate_size, from_config.activation(f)))
    layers = [plain] * min(dense, n.num_layers)
    if len(layers) < n.num_layers:
        layers += [LayerSpec(attention, mixture(f, routing))] * (n.num_layers - len(layers))
    return n.model(family_name, layers, ropes, from_config.tied(f, outer))


def mixture(f: Fields, absent: Routing) -> MoeFfn:
    """The experts of config.json."""
    method = f.text("topk_method", METHODS[absent.group_scores])
    if method not in ("greedy", *METHODS.values()):
        raise f.error("topk_method", method, f"greedy, {' or '.join(METHODS.values())}")
    scores = f.text("scoring_func", absent.scores)
    if scores not in ("softmax", "sigmoid"):
        raise f.error("scoring_func", scores, "softmax or sigmoid")
    grouped = method != "greedy"
    of_groups = lambda name, default: f.integer(name, default, high=limits.MAX_EXPERTS) if grouped else 1
    routing = replace(
        absent,
        scores=scores,
        renormalise=f.flag("norm_topk_prob", absent.renormalise),
        scale=f.number("routed_scaling_factor", absent.scale, high=1e6),
        groups=of_groups("n_group", absent.groups),
        top_groups=of_groups("topk_group", absent.top_groups),
    )
    size = f.integer("moe_intermediate_size", high=limits.MAX_FFN)
    shared = f.integer("n_shared_experts", 0, low=0, high=limits.MAX_EXPERTS) * size
    return from_config.experts(
        f,
        "n_routed_experts",
        "moe_intermediate_size",
        routing,
        correction_bias=method == METHODS[2],
        shared_size=shared,
    )


def config(f: Fields, outer: Fields) -> ModelSpec:
    """From config.json."""
    return model(NAME, f, outer, ConfigDefaults(max_position=2048), ROUTING)


def gguf(header: GgufHeader) -> ModelSpec:
    """From GGUF metadata, of files with attn_kv_b as well as with attn_k_b and attn_v_b."""
    f = header.fields
    rotated = f.integer("rope.dimension_count", 64, high=limits.MAX_HEAD_DIM)
    # Older files have the widths of heads where newer ones have those of what is cached.
    suffix = "_mla" if f.has("attention.key_length_mla") else ""
    key = f.integer(f"attention.key_length{suffix}", high=limits.MAX_HEAD_DIM)
    value = f.integer(f"attention.value_length{suffix}", high=limits.MAX_HEAD_DIM)
    if key <= rotated:
        raise f.error(f"attention.key_length{suffix}", key, f"above rope.dimension_count, which is {rotated}")
    widths = {"attention.key_length": rotated, "attention.value_length": rotated}
    of_rotation = replace(header, fields=Fields({**f.values, **widths}, f.where, f.prefix))
    n = from_gguf.sizes(of_rotation)
    rotation = from_gguf.rotation(of_rotation, n, interleaved=True)
    scale = key**-0.5
    if multiplier := f.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0):
        scale *= (1 + multiplier * math.log(max(1.0, f.number("rope.scaling.factor", 1.0)))) ** 2
        rotation = replace(rotation, magnitude=1.0)
    attention = LatentAttention(
        n.num_heads,
        f.integer("attention.kv_lora_rank", high=limits.MAX_LATENT),
        key - rotated,
        rotated,
        value,
        scale,
        0 if from_gguf.has(header, "attn_q.weight") else f.integer("attention.q_lora_rank", high=limits.MAX_WIDTH),
    )
    predicting = f.integer("nextn_predict_layers", 0, low=0, high=n.num_layers - 1)
    count = n.num_layers - predicting
    dense = f.integer("leading_dense_block_count", 0, low=0) if from_gguf.is_mixture(header) else count
    layers = [LayerSpec(attention, DenseFfn(n.intermediate_size))] * min(dense, count)
    if len(layers) < count:
        experts = from_gguf.experts(header, ROUTING, shared=True)
        if experts.routing.scores == "sigmoid":
            experts = replace(experts, routing=replace(experts.routing, group_scores=2))
        layers += [LayerSpec(attention, experts)] * (count - len(layers))
    n = replace(n, num_layers=count)
    return n.model(NAME, layers, {"global": rotation}, from_gguf.tied(header))


def export(spec: ModelSpec, where: str) -> GgufForm:
    """As GGUF metadata. ArchitectureError for a rotation of halves, and for YaRN with two magnitudes."""
    a, r = spec.layers[0].mixer, spec.ropes["global"]
    assert isinstance(a, LatentAttention)
    if r.scaling.get("mscale_all_dim") and r.magnitude != 1.0:
        raise ArchitectureError(f"{where}: YaRN with mscale and mscale_all_dim that differ has no GGUF form")
    if a.norm_eps not in (0.0, spec.norm_eps):
        raise ArchitectureError(
            f"{where}: rms_norm_eps {spec.norm_eps:g} has no GGUF form: readers would use it where the model has "
            f"{a.norm_eps:g}"
        )
    if not r.interleaved:
        raise ArchitectureError(f"{where}: latent attention with rope_interleave false has no GGUF form")
    cached = Attention(a.num_heads, 1, a.rope_dim, a.scale)  # of which `dense` asks for sizes
    shaped = replace(spec, layers=tuple(replace(layer, mixer=cached) for layer in spec.layers))
    names = [
        "leading_dense_block_count",
        "expert_shared_count",
        "expert_gating_func",
        "expert_weights_norm",
        "expert_weights_scale",
        "expert_group_count",
        "expert_group_used_count",
    ]
    mixed = any(isinstance(layer.ffn, MoeFfn) for layer in spec.layers)
    more = {
        **(to_gguf.experts(spec, where, names) if mixed else NO_EXPERTS | {names[0]: len(spec.layers)}),
        "attention.kv_lora_rank": a.kv_lora_rank,
        "attention.key_length": a.key_width,
        "attention.value_length": a.kv_lora_rank,
        "attention.key_length_mla": a.head_dim,
        "attention.value_length_mla": a.v_dim,
        "rope.dimension_count": a.rope_dim,
    }
    if a.q_lora_rank:
        more["attention.q_lora_rank"] = a.q_lora_rank
    form = to_gguf.dense(GGUF, shaped, where, more)
    if all_dims := float(r.scaling.get("mscale_all_dim") or 0.0):
        scaling = f"{GGUF}.rope.scaling."
        kept = {name: value for name, value in form.metadata.items() if name != f"{scaling}attn_factor"}
        form = replace(form, metadata={**kept, f"{scaling}yarn_log_multiplier": 0.1 * all_dims})
    return form


SHARED = {f"mlp.shared_experts.{part}_proj": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
SAFETENSORS = replace(
    family.SAFETENSORS_EXPERTS,
    layer={**family.SAFETENSORS_EXPERTS.layer, **SHARED, "self_attn.kv_b_proj": KV_B},
    kv_b="kv_b_proj",
)
GGUF_NAMES = replace(
    family.GGUF_EXPERTS,
    layer={
        **family.GGUF_EXPERTS.layer,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": KV_B,
        "attn_k_b": KV_B[0],
        "attn_v_b": KV_B[1],
    },
    by_head=KV_B,
    kv_b="attn_kv_b",
)

FAMILY = Family(
    name=NAME,
    architectures=("DeepseekV2ForCausalLM",),
    model_types=("deepseek_v2",),
    gguf=GGUF,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=SAFETENSORS,
    gguf_names=GGUF_NAMES,
    ignored=family.ROTATIONS,
)

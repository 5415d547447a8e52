"""Step-3.5 and 3.7: gates of heads, heads and rotation that differ by layer, limits of the last layers' gates."""

from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import exaone4, family, laguna
from ckdist.models.families.family import Family, Fields, GgufForm, GgufHeader, GgufWriter
from ckdist.models.spec import Attention, DenseFfn, Ffn, ModelSpec, MoeFfn
from ckdist.program.ops.elementwise import LIMIT_PARTS
from ckdist.program.routing import Routing

GGUF, KINDS = "step35", ("full_attention", "sliding_attention")
ROUTING = Routing(used=8, scores="sigmoid")
KEYS = ConfigKeys(
    {
        **sizes(hidden=4096, ffn=11264, layers=45, heads=64, kv_heads=8, head=128, positions=128000, vocab=128815),
        "hidden_act": "silu", "moe_intermediate_size": 1280, "n_routed_experts": 288, "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "routed_scaling_factor": 1.0, "share_expert_dim": 1280,
    },
    aliases={
        "moe_num_experts": "n_routed_experts",
        "moe_router_scaling_factor": "routed_scaling_factor",
        "moe_top_k": "num_experts_per_tok",
        "num_attention_groups": "num_key_value_heads",
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
        "share_expert_dims": "share_expert_dim",
    },
    nulls={"sliding_window": None},
    only={
        "att_impl_type": "GQA", "moe_every_n_layer": 1, "moe_router_activation": "sigmoid", "norm_expert_weight": True,
        "sink": False, "use_head_wise_attn_gate": True, "use_moe": True, "use_moe_router_bias": True,
        "use_qk_norm": True, "zero_centered": True,
    },
    unused=(
        *("moe_layer_offset", "mtp_layer_types", "mtp_mlp_layer_types", "need_fp32_gate", "per_layer_config"),
        *("use_rope_layers", "yarn_only_types", "max_seq_len", "understand_projector_stride", "image_token_len"),
        "patch_token_len",
    ),
)  # fmt: skip


def listed(f: Fields, name: str, count: int, absent: Any) -> list[Any]:
    """Reads a list with a value for each layer; values of layers that predict further tokens follow."""
    given = f.raw(name)
    given = given.tolist() if isinstance(given, np.ndarray) else given
    if given is None or (isinstance(given, (int, float)) and name == "rope_theta"):
        return [absent if given is None else given] * count
    if not isinstance(given, list) or len(given) < count:
        raise f.error(name, given, f"a list with a value for each of {count} layers")
    return given[:count]


def swiglu_limits(f: Fields, name: str, count: int) -> list[float]:
    """Reads the limits of gates by layer; 0: none."""
    found = [one or 0.0 for one in listed(f, name, count, 0.0)]
    for one in found:
        if not isinstance(one, (int, float)) or not 0 <= one < 1 << 15 or one * LIMIT_PARTS % 1:
            raise f.error(name, one, f"from 0 to {1 << 15}, in steps of 1 / {LIMIT_PARTS}")
    return [float(one) for one in found]


def feed_forwards(dense: DenseFfn, moe: MoeFfn, sparse: list[bool], *by_layer: list[float]) -> list[Ffn]:
    """Makes each layer's feed-forward. `by_layer`: limits of routed experts, and of shared ones and dense layers."""
    return [
        replace(moe, limits=(routed, shared) if routed or shared else ()) if is_sparse else replace(dense, limit=shared)
        for is_sparse, routed, shared in zip(sparse, *by_layer, strict=True)
    ]


def sparse_layers(f: Fields, count: int) -> list[bool]:
    """Reads whether each layer has experts: mlp_layer_types, or the numbers of layers in moe_layers_enum."""
    kinds = listed(f, "mlp_layer_types", count, None)
    if kinds[0] is not None:
        return [kind == "sparse" for kind in kinds]
    given = f.raw("moe_layers_enum")
    numbers = [one.strip() for one in given.split(",")] if isinstance(given, str) else given
    if numbers is None:
        return [i >= 3 for i in range(count)]
    if not isinstance(numbers, list) or any(not str(one).isdigit() for one in numbers):
        raise f.error("moe_layers_enum", given, "numbers of layers with commas between them")
    return [i in {int(one) for one in numbers} for i in range(count)]


def nested_rotations(f: Fields, kinds: list[str]) -> Fields:
    """Returns `f` with rope_parameters by the kinds of layers, made of lists by layer in published files."""
    if any(f.sub("rope_parameters").has(kind) for kind in KINDS):
        return f
    bases, parts = (
        listed(f, name, len(kinds), one) for name, one in (("rope_theta", 1e4), ("partial_rotary_factors", 1.0))
    )
    if not isinstance(f.raw("yarn_only_types") or [], list):
        raise f.error("yarn_only_types", f.raw("yarn_only_types"), "a list of kinds of layers")
    made, scaled, given = {}, f.raw("yarn_only_types") or [KINDS[0]], f.sub("rope_parameters")
    for kind in dict.fromkeys(kinds):
        of_kind = {(base, part) for base, part, one in zip(bases, parts, kinds, strict=True) if one == kind}
        if len(of_kind) != 1:
            needed = f"the same, with partial_rotary_factors, in all layers of {kind}"
            raise f.error("rope_theta", sorted(of_kind), needed)
        base, part = of_kind.pop()
        scaling = {name: given.raw(name) for name in given.values} if kind in scaled else {}
        made[kind] = {**scaling, "rope_theta": base, "partial_rotary_factor": part}
    return Fields({"rope_theta": 1e4, "rope_parameters": made}, f.where, f.prefix)


def config(f: Fields, outer: Fields) -> ModelSpec:
    n, window = from_config.sizes(f), from_config.window(f)
    kinds = listed(f, "layer_types", n.num_layers, KINDS[0])
    if any(kind not in KINDS for kind in kinds):
        raise f.error("layer_types", kinds, f"{KINDS[0]} or {KINDS[1]} for each layer")
    other = f.sub("attention_other_setting")
    usual_heads = other.integer("num_attention_heads", n.num_heads)
    heads = f.integer("num_sliding_attention_heads", usual_heads, high=limits.MAX_HEADS)
    sizes = (("num_attention_groups", n.num_kv_heads), ("head_dim", n.head_dim), ("true_head_dim", n.head_dim))
    for name, must in (*sizes, ("attention_type", KINDS[1])):
        if other.raw(name) not in (None, must):
            needed = f"{must}, as in full layers" if name != "attention_type" else KINDS[1]
            raise other.error(name, other.raw(name), needed)
    scale = f.number("query_pre_attn_scalar", float(n.head_dim)) ** -0.5
    full = n.attention(scale, qk_norm="head", gated="sigmoid", head_gates=True)
    shared = f.integer("share_expert_dim", high=limits.MAX_FFN)
    routing = replace(ROUTING, scale=f.number("routed_scaling_factor", high=1e6))
    more = {"correction_bias": True, "shared_size": shared}
    moe = from_config.experts(f, "n_routed_experts", "moe_intermediate_size", routing, **more)
    by_layer = [swiglu_limits(f, name, n.num_layers) for name in ("swiglu_limits", "swiglu_limits_shared")]
    ffns = feed_forwards(from_config.dense(f), moe, sparse_layers(f, n.num_layers), *by_layer)
    ropes, sliding = from_config.rotations(nested_rotations(f, kinds), n, 1.0), [kind == KINDS[1] for kind in kinds]
    counts = [heads if slides else n.num_heads for slides in sliding]
    local = "local" if "local" in ropes else "global"
    made = laguna.layers(full, counts, window, sliding, ffns, local)
    return from_config.model(f, outer, n, made, ropes)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata. Half of each head rotates in full layers; a tensor has the factors of their frequencies."""
    f, (n, heads) = header.fields, laguna.gguf_sizes(header)
    sliding = header.sliding_layers(n.num_layers, 0)
    window, moe = f.integer("attention.sliding_window", high=limits.MAX_POSITION), header.experts(ROUTING, shared=True)
    dense = f.integer("leading_dense_block_count", 0, low=0, high=n.num_layers)
    by_layer = [swiglu_limits(f, f"swiglu_clamp_{name}", n.num_layers) for name in ("exp", "shexp")]
    ffns = feed_forwards(header.dense(), moe, [i >= dense for i in range(n.num_layers)], *by_layer)
    full = replace(header.attention(n), gated="sigmoid", head_gates=True)
    cut = lambda name: None if (made := header.vector(name)) is None else made[: n.head_dim // 4]
    half = replace(header.but({"rope.dimension_count": n.head_dim // 2}), vector=cut)
    ropes = {"global": half.rotation(n, partial=True), "local": laguna.local_rotation(header, n)}
    return header.model(n, laguna.layers(full, heads, window, sliding, ffns, "local"), ropes)


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError for rotations that its readers do not have."""
    local, full = spec.ropes.get("local"), spec.ropes["global"]
    width = spec.layers[0].attention.head_dim
    if local is None or local.dims != width or full.dims * 2 != width:
        needs = "half of a head rotates, and all in sliding layers"
        raise ArchitectureError(f"{where}: step3p5 has no GGUF form unless {needs}")
    kv_heads = [mixer.num_kv_heads for mixer in spec.mixers(Attention)]
    sizes = {"rope.dimension_count": width, "attention.head_count_kv": kv_heads}
    return {**laguna.written(spec, where), **exaone4.written(spec, where), **sizes}


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    from ckdist.models import to_gguf

    unlimited = spec.with_layers(ffn=[without_limits(layer.ffn) for layer in spec.layers])
    made = to_gguf.form(GgufWriter(written, experts=laguna.OPTIONAL, factors=True), GGUF, unlimited, where)
    limits_of = lambda ffn: (ffn.limits or (0.0, 0.0)) if isinstance(ffn, MoeFfn) else (0.0, ffn.limit)
    by_layer = zip(*(limits_of(layer.ffn) for layer in spec.layers), strict=True)
    clamps = {f"{GGUF}.swiglu_clamp_{name}": list(one) for name, one in zip(("exp", "shexp"), by_layer, strict=True)}
    padded = {name: np.pad(one, (0, len(one)), constant_values=1) for name, one in made.vectors.items()}
    return replace(made, metadata={**made.metadata, **clamps}, vectors=padded)


def without_limits(ffn: Ffn | None) -> Ffn | None:
    """The feed-forward without limits."""
    if isinstance(ffn, DenseFfn):
        return replace(ffn, limit=0.0)
    return ffn and replace(ffn, limits=())


MOE = {
    **family.renamed("share_expert.{}_proj", "mlp.shared_expert.{}_proj"),
    **family.renamed("moe.{}_proj", "mlp.experts.{}_proj"),
    "moe.gate": "mlp.gate", "moe.router_bias": "mlp.gate.e_score_correction.bias", "self_attn.g_proj": laguna.GATE,
}  # fmt: skip
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=family.SAFETENSORS.but_in_layers(
        MOE, (r".*\.moe\.(gate|up|down)_proj\.weight", "stacked"), (r".*norm\.weight", "plus_one")
    ),
    gguf_names=family.GGUF_EXPERTS.but_in_layers({"attn_gate": laguna.GATE}),
)

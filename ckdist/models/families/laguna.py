"""Laguna: gates of heads or of elements by softplus, heads and rotation that differ by layer, GLM-4.5's experts."""

from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits
from ckdist.models.config_keys import sizes
from ckdist.models.families import exaone4, family, glm4moe
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, Ffn, LayerSpec, ModelSpec, RopeSpec
from ckdist.program.routing import Routing

PERIOD = 4  # the first layer of each period has no window
HEADS, ELEMENTS = "per-head", "per-element"
KEYS = glm4moe.KEYS.but(
    defaults={
        **sizes(hidden=2048, ffn=8192, layers=40, heads=48, head=128, vocab=100352),
        **dict.fromkeys(("n_group", "n_shared_experts", "topk_group")), "gating": True, "moe_intermediate_size": 512,
        "norm_topk_prob": True, "num_experts": 256, "partial_rotary_factor": None, "rms_norm_eps": 1e-6,
        "shared_expert_intermediate_size": 512, "sliding_window": 512,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    },
    aliases={"moe_routed_scaling_factor": "routed_scaling_factor", "num_local_experts": "num_experts"},
    only={
        "moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0,
        "moe_router_score_func": "sigmoid", "moe_router_use_sigmoid": True, "norm_topk_prob": True,
        "swa_attention_sink_enabled": False,
    },
    unused=("decoder_sparse_step", "mlp_only_layers", "sliding_window"),  # mlp_layer_types says it; if no layer slides
)  # fmt: skip


def layers(
    full: Attention, heads: list[int], window: int, sliding: list[bool], ffns: list[Ffn], local: str
) -> list[LayerSpec]:
    """Makes the layers. `local`: the rotation of sliding ones."""
    slide = replace(full, window=window, rope=local)
    mixers = [replace(slide if s else full, num_heads=count) for s, count in zip(sliding, heads, strict=True)]
    return [LayerSpec(mixer, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]


def heads_by_layer(f: Fields, name: str, n: Sizes) -> list[int]:
    """Reads the number of query heads of each layer from a list."""
    given = f.raw(name)
    if given is None:
        return [n.num_heads] * n.num_layers
    counts = given.tolist() if isinstance(given, np.ndarray) else given
    right = isinstance(counts, list) and len(counts) >= n.num_layers
    if not right or any(type(c) is not int or not 0 < c <= limits.MAX_HEADS or c % n.num_kv_heads for c in counts):
        raise f.error(name, given, f"a list of {n.num_layers} multiples of {n.num_kv_heads}, the key heads")
    return counts[: n.num_layers]


def gates(f: Fields, n: Sizes) -> dict[str, Any]:
    """Reads the form of gates as fields of Attention."""
    kind = HEADS if f.raw("gating") is True else f.raw("gating")
    if kind not in (HEADS, ELEMENTS):
        raise f.error("gating", kind, f"true, {HEADS} or {ELEMENTS}")
    if f.raw("gating_types") not in (None, [kind.replace("-", "_")] * n.num_layers):
        raise f.error("gating_types", f.raw("gating_types"), f"{kind.replace('-', '_')} in all layers, as gating")
    return {"gated": "softplus", "head_gates": kind == HEADS}


def config(f: Fields, outer: Fields) -> ModelSpec:
    n, window = from_config.sizes(f), from_config.window(f)
    dense = from_config.dense_layers(f) if f.raw("mlp_layer_types") else 1
    shared = f.integer("shared_expert_intermediate_size", high=limits.MAX_FFN)
    routing = Routing(used=8, scores="sigmoid", scale=f.number("routed_scaling_factor", high=1e6))
    more = {"correction_bias": True, "shared_size": shared}
    moe = from_config.experts(f, "num_experts", "moe_intermediate_size", routing, **more)
    ffns = from_config.after_dense(lambda: from_config.dense(f), moe, dense, n.num_layers)
    full = n.attention(qk_norm="head", **gates(f, n))
    sliding = from_config.sliding_layers(f, n.num_layers, [False] * n.num_layers)
    ropes, heads = from_config.rotations(f, n, 1.0), heads_by_layer(f, "num_attention_heads_per_layer", n)
    local = "local" if "local" in ropes else "global"
    return from_config.model(f, outer, n, layers(full, heads, window, sliding, ffns, local), ropes)


def local_rotation(header: GgufHeader, n: Sizes) -> RopeSpec:
    """Reads the rotation of sliding layers."""
    return header.local_rotation(header.fields.integer("rope.dimension_count_swa", n.head_dim, high=n.head_dim))


def gguf_sizes(header: GgufHeader) -> tuple[Sizes, list[int]]:
    """Reads the sizes from GGUF metadata, and each layer's query heads, without layers that predict further tokens."""
    f, name = header.fields, "attention.head_count"
    given = f.raw(name)
    counts = given.tolist() if isinstance(given, np.ndarray) else []
    most = max(counts) if counts and all(type(count) is int for count in counts) else given
    n = header.but({name: most}).sizes()
    return n, heads_by_layer(f, name, n) if isinstance(given, np.ndarray) else [n.num_heads] * n.num_layers


def gguf(header: GgufHeader) -> ModelSpec:
    f, (n, heads), pattern = header.fields, gguf_sizes(header), "attention.sliding_window_pattern"
    window = f.integer("attention.sliding_window", 0, low=0, high=limits.MAX_POSITION)
    usual = header.but({pattern: np.asarray([i % PERIOD != 0 for i in range(n.num_layers)])})
    sliding = (header if f.has(pattern) else usual).sliding_layers(n.num_layers, PERIOD)
    ffns = header.feed_forwards(n, header.experts(glm4moe.ROUTING, shared=True), 1)
    by_head = header.dims.get("blk.0.attn_gate.weight", (0, 0))[1] == heads[0]
    attention = replace(header.attention(n), gated="softplus", head_gates=by_head)
    ropes = {"global": header.rotation(n, partial=True), **({"local": local_rotation(header, n)} if window else {})}
    made = layers(attention, heads, window, sliding if window else [False] * n.num_layers, ffns, "local")
    return header.model(n, made, ropes)


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    heads = {"attention.head_count": [mixer.num_heads for mixer in spec.mixers(Attention)]}
    if (local := spec.ropes.get("local")) is None:
        return heads
    if local.magnitude != 1.0 or local.scaling.get("rope_type", "default") != "default":
        raise ArchitectureError(f"{where}: laguna whose sliding layers have a scaled rotation has no GGUF form")
    own = {"rope.freq_base_swa": float(local.theta), "rope.dimension_count_swa": local.dims}
    return {**heads, **own, **exaone4.written(spec, where)}


OPTIONAL = ("leading_dense_block_count", "expert_shared_feed_forward_length", "expert_shared_count")
OPTIONAL += ("expert_gating_func", "expert_weights_norm", "expert_weights_scale")
GATE = "self_attn.gate_proj"
SHARED = family.renamed("mlp.shared_expert.{}_proj", "mlp.shared_expert.{}_proj")
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, experts=OPTIONAL, rotated=True),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers(
        {
            **family.SHARED_EXPERTS, **SHARED, "self_attn.g_proj": GATE,
            "mlp.experts.e_score_correction": "mlp.gate.e_score_correction",
        }
    ),
    gguf_names=family.GGUF_EXPERTS.but_in_layers({"attn_gate": GATE}),
)  # fmt: skip

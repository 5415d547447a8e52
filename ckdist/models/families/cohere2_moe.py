"""North (Cohere 2 with experts): experts and attention of the same norm, after dense layers.

The sum of routed and shared experts may be halved.
"""

from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits
from ckdist.models.families import cohere2, family
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import Attention, DenseFfn, Ffn, LayerSpec, ModelSpec, MoeFfn
from ckdist.program.routing import Routing

KINDS = ("dense", "sparse")
KEYS = cohere2.KEYS.but(
    defaults={
        "expert_selection_fn": "softmax", "first_k_dense_replace": 0, "head_dim": 128, "norm_topk_prob": True,
        "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0,
        "prefix_dense_sliding_window_pattern": 1, "shared_expert_combination_strategy": "average",
    },
    aliases={"num_local_experts": "num_experts"},
    unused=("layer_norm_eps",),  # with rms_norm_eps
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    rms = f.has("rms_norm_eps")
    n = from_config.sizes(f, "rms_norm_eps" if rms else "layer_norm_eps")
    count, dense = n.num_layers, min(f.integer("first_k_dense_replace", low=0), n.num_layers)
    first, period = f.integer("prefix_dense_sliding_window_pattern"), f.integer("sliding_window_pattern")
    usual = [(i + 1) % first != 0 if i < dense else (i - dense + 1) % period != 0 for i in range(count)]
    sliding = from_config.sliding_layers(f, count, usual)
    kinds = from_config.layer_kinds(f, count, KINDS, "mlp_layer_types") or [KINDS[i >= dense] for i in range(count)]
    scores = f.choice("expert_selection_fn", ("softmax", "sigmoid"))
    routing = Routing(2, scores, renormalise=scores == "softmax" or f.flag("norm_topk_prob"))
    shared = f.integer("num_shared_experts", low=0, high=limits.MAX_EXPERTS) * f.integer("intermediate_size")
    averaged = f.choice("shared_expert_combination_strategy", ("average", "sum")) == "average"
    experts = from_config.experts(f, "num_experts", "intermediate_size", routing, shared_size=shared)
    experts = replace(experts, scale=0.5 if averaged and shared else 1.0)
    forced = first == 1  # dense layers rotate although they do not slide
    attention, window = from_config.attention(f, n), from_config.window(f)
    dense_size = f.integer("prefix_dense_intermediate_size", high=limits.MAX_FFN) if KINDS[0] in kinds else 1
    ffns = [DenseFfn(dense_size) if kind == KINDS[0] else experts for kind in kinds]
    more = {"norm": "rms" if rms else "layer", "logit_scale": f.number("logit_scale", high=1e6)}
    ropes = from_config.rotations(f, n, interleaved=True)
    return from_config.model(f, outer, n, layers(attention, window, ffns, sliding, forced), ropes, **more)


def layers(attention: Attention, window: int, ffns: list[Ffn], sliding: list[bool], forced: bool) -> list[LayerSpec]:
    """The layers. Sliding ones rotate, and dense ones if `forced`."""
    made = []
    for ffn, slides in zip(ffns, sliding, strict=True):
        rope = "global" if slides or (forced and isinstance(ffn, DenseFfn)) else None
        mixer = replace(attention, window=window * slides, rope=rope)
        made.append(LayerSpec(mixer, ffn, cohere2.NORMS, parallel=True))
    return made


def gguf(header: GgufHeader) -> ModelSpec:
    f, rms_name = header.fields, "attention.layer_norm_rms_epsilon"
    rms = bool(f.raw(rms_name))
    n = header.sizes(rms_name if rms else "attention.layer_norm_epsilon")
    experts = header.experts(Routing(2, "sigmoid", renormalise=False), shared=True)
    experts = replace(experts, scale=0.5 if experts.shared_size else 1.0)
    ffns, window = header.feed_forwards(n, experts), f.integer("attention.sliding_window", high=1 << 30)
    sliding = header.sliding_layers(n.num_layers, cohere2.PERIOD)
    made = layers(header.attention(n), window, ffns, sliding, True)
    more = {"norm": "rms" if rms else "layer", "logit_scale": f.number("logit_scale", 1.0, high=1e6)}
    ropes = {"global": header.rotation(n, interleaved=True)}
    return header.model(n, made, ropes, **more)


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError for a model that its readers compute otherwise."""
    for layer in spec.layers:
        a, moe = layer.attention, layer.ffn if isinstance(layer.ffn, MoeFfn) else None
        adds = moe is not None and moe.shared_size > 0 and moe.scale == 1
        if a.qkv_bias or adds or bool(a.rope) != bool(a.window or moe is None):
            raise ArchitectureError(f"{where}: {spec.family} with biases, sums or other rotations has no GGUF form")
    rms = spec.norm == "rms"
    return {
        "attention.layer_norm_rms_epsilon": float(spec.norm_eps) if rms else 0.0,
        **({} if rms else {"attention.layer_norm_epsilon": float(spec.norm_eps)}),
        "attention.sliding_window": max(mixer.window for mixer in spec.mixers(Attention)),
        "attention.sliding_window_pattern": [bool(mixer.window) for mixer in spec.mixers(Attention)],
        "logit_scale": float(spec.logit_scale),
    }


EXPERTS = ("expert_shared_feed_forward_length", *family.GROUPED_EXPERTS[:4])
FAMILY = replace(
    cohere2.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, EXPERTS, rotated=True),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers(family.SHARED_EXPERTS),
    gguf_names=family.GGUF_EXPERTS,
)

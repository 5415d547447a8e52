"""North (Cohere 2 with experts): experts and attention of the same norm, after dense layers.

The sum of routed and shared experts may be halved.
"""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.families import cohere2, family
from ckdist.models.families.family import GgufWriter, in_layers
from ckdist.models.fields import Fields
from ckdist.models.spec import DenseFfn, LayerSpec, ModelSpec
from ckdist.program.routing import Routing

NAME, KINDS = "cohere2_moe", ("dense", "sparse")
KEYS = cohere2.KEYS.but(
    defaults={
        "expert_selection_fn": "softmax", "first_k_dense_replace": 0, "head_dim": 128, "norm_topk_prob": True,
        "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0,
        "prefix_dense_sliding_window_pattern": 1, "shared_expert_combination_strategy": "average",
    },
    aliases={"num_local_experts": "num_experts"},
    unused=("layer_norm_eps",),  # with rms_norm_eps
)  # fmt: skip


def chosen(f: Fields, name: str, known: tuple[str, str]) -> str:
    """Reads a text that is one of two."""
    if (value := f.text(name)) not in known:
        raise f.error(name, value, " or ".join(known))
    return value


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    rms = f.has("rms_norm_eps")
    n, bias = from_config.sizes(f, "rms_norm_eps" if rms else "layer_norm_eps"), f.flag("attention_bias")
    count, dense = n.num_layers, min(f.integer("first_k_dense_replace", low=0), n.num_layers)
    first, period = f.integer("prefix_dense_sliding_window_pattern"), f.integer("sliding_window_pattern")
    usual = [(i + 1) % first != 0 if i < dense else (i - dense + 1) % period != 0 for i in range(count)]
    sliding = from_config.sliding_layers(f, count, usual)
    kinds = from_config.layer_kinds(f, count, KINDS, "mlp_layer_types") or [KINDS[i >= dense] for i in range(count)]
    scores = chosen(f, "expert_selection_fn", ("softmax", "sigmoid"))
    routing = Routing(2, scores, renormalise=scores == "softmax" or f.flag("norm_topk_prob"))
    shared = f.integer("num_shared_experts", low=0, high=limits.MAX_EXPERTS) * f.integer("intermediate_size")
    averaged = chosen(f, "shared_expert_combination_strategy", ("average", "sum")) == "average"
    experts = from_config.experts(f, "num_experts", "intermediate_size", routing, shared_size=shared)
    experts = replace(experts, scale=0.5 if averaged and shared else 1.0)
    attention, window = n.attention(qkv_bias=bias, o_bias=bias), from_config.window(f)
    layers = []
    for kind, slides in zip(kinds, sliding, strict=True):
        is_dense = kind == KINDS[0]
        ffn = DenseFfn(f.integer("prefix_dense_intermediate_size", high=limits.MAX_FFN)) if is_dense else experts
        rope = "global" if slides or (is_dense and first == 1) else None
        layers.append(
            LayerSpec(replace(attention, window=window * slides, rope=rope), ffn, cohere2.NORMS, parallel=True)
        )
    more = {"norm": "rms" if rms else "layer", "logit_scale": f.number("logit_scale", high=1e6)}
    return n.model(NAME, layers, from_config.rotations(f, n, interleaved=True), from_config.tied(f, outer), **more)


FAMILY = replace(
    cohere2.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=None,
    to_gguf=GgufWriter(refused="it is not written yet"),
    safetensors=family.SAFETENSORS_EXPERTS.but(in_layers("model.layers", family.SHARED_EXPERTS)),
    gguf_names=family.GGUF,
)

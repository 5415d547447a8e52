"""GLM-4.5: experts behind some layers without, shared ones, half of a head rotated. Layers that predict further tokens
are left out.
"""

from dataclasses import replace

from ckdist.models import from_config, from_gguf, limits, to_gguf
from ckdist.models.families import family
from ckdist.models.families.family import Family, GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.from_config import Sizes
from ckdist.models.spec import Attention, DenseFfn, LayerSpec, ModelSpec, MoeFfn, RopeSpec
from ckdist.program.routing import Routing

NAME = "glm4moe"
DEFAULTS = from_config.ConfigDefaults(max_position=131072, norm_eps=1e-5)
SHARED = {f"mlp.shared_experts.{part}_proj": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
KEYS = (
    "leading_dense_block_count",
    "expert_shared_count",
    "expert_gating_func",
    "expert_weights_norm",
    "expert_weights_scale",
    "expert_group_count",
    "expert_group_used_count",
)


def model(n: Sizes, attention: Attention, ffn: MoeFfn, dense: int, rope: RopeSpec, tied: bool) -> ModelSpec:
    """The first `dense` layers have no experts."""
    first = DenseFfn(n.intermediate_size, ffn.activation)
    layers = [LayerSpec(attention, first if i < dense else ffn) for i in range(n.num_layers)]
    return n.model(NAME, layers, {"global": rope}, tied)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """From config.json."""
    n = from_config.sizes(f, DEFAULTS)
    attention = Attention(
        n.num_heads,
        n.num_kv_heads,
        n.head_dim,
        n.head_dim**-0.5,
        qkv_bias=f.flag("attention_bias"),
        qk_norm="head" if f.flag("use_qk_norm") else "",
    )
    routing = Routing(
        used=8,
        scores="sigmoid",
        renormalise=f.flag("norm_topk_prob", True),
        scale=f.number("routed_scaling_factor", 1.0, high=1e6),
        groups=f.integer("n_group", 1, high=limits.MAX_EXPERTS),
        top_groups=f.integer("topk_group", 1, high=limits.MAX_EXPERTS),
    )
    shared = f.integer("n_shared_experts", 1, low=0, high=limits.MAX_EXPERTS)
    size = f.integer("moe_intermediate_size", high=limits.MAX_FFN)
    ffn = from_config.experts(
        f, "n_routed_experts", "moe_intermediate_size", routing, correction_bias=True, shared_size=shared * size
    )
    dense = f.integer("first_k_dense_replace", 1, low=0, high=limits.MAX_LAYERS)
    rope = from_config.rotations(f, n, partial=0.5)["global"]
    return model(n, attention, ffn, dense, rope, from_config.tied(f, outer))


def gguf(header: GgufHeader) -> ModelSpec:
    """From GGUF metadata, whose layers count those that predict further tokens."""
    f, n = header.fields, from_gguf.sizes(header)
    predicting = f.integer("nextn_predict_layers", 0, low=0, high=n.num_layers - 1)
    n = replace(n, num_layers=n.num_layers - predicting)
    ffn = from_gguf.experts(header, Routing(used=8, scores="sigmoid"), shared=True)
    dense = f.integer("leading_dense_block_count", 1, low=0, high=limits.MAX_LAYERS)
    rope = from_gguf.rotation(header, n, partial=True)
    return model(n, from_gguf.attention(header, n), ffn, dense, rope, from_gguf.tied(header))


def export(spec: ModelSpec, where: str) -> GgufForm:
    """As GGUF metadata."""
    more = {"rope.dimension_count": spec.ropes["global"].dims, **to_gguf.experts(spec, where, KEYS)}
    return to_gguf.dense(NAME, spec, where, more)


FAMILY = Family(
    name=NAME,
    architectures=("Glm4MoeForCausalLM",),
    model_types=("glm4_moe",),
    gguf=NAME,
    from_config=config,
    from_gguf=gguf,
    to_gguf=export,
    safetensors=replace(family.SAFETENSORS_EXPERTS, layer={**family.SAFETENSORS_EXPERTS.layer, **SHARED}),
    gguf_names=replace(
        family.GGUF_EXPERTS,
        layer={
            **{k: v for k, v in family.GGUF_EXPERTS.layer.items() if k != "ffn_norm"},
            "post_attention_norm": "post_attention_layernorm",
        },
    ),
    ignored=family.ROTATIONS,
)

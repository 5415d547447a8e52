"""GLM-4.5: some dense layers, then layers with experts and a shared expert; half of each head is rotated.

A layer that predicts further tokens (MTP) drafts: see `ckdist.models.predictor`.
"""

from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.spec import Ffn, LayerSpec, ModelSpec
from ckdist.program.routing import Routing

KEYS = ConfigKeys(
    {
        "first_k_dense_replace": 1, "hidden_act": "silu", "max_position_embeddings": 131072, "n_group": 1,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "routed_scaling_factor": 1.0,
        "topk_group": 1,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)  # fmt: skip


ROUTING = Routing(used=8, scores="sigmoid")  # of GGUF files that do not say it


def routing(f: Fields) -> Routing:
    """Reads how experts are chosen, from a config.json."""
    return Routing(
        used=8,
        scores="sigmoid",
        renormalise=f.flag("norm_topk_prob"),
        scale=f.number("routed_scaling_factor", high=1e6),
        groups=f.integer("n_group", high=limits.MAX_EXPERTS),
        top_groups=f.integer("topk_group", high=limits.MAX_EXPERTS),
    )


def feed_forwards(
    f: Fields, num_layers: int, count: str = "n_routed_experts", shared: str = "n_shared_experts"
) -> list[Ffn]:
    """Reads the feed-forward of each layer: first dense ones, then experts and shared experts of the same width.

    `count` and `shared` are the fields of their numbers.
    """
    size = f.integer("moe_intermediate_size", high=limits.MAX_FFN)
    more = {"correction_bias": True, "shared_size": f.integer(shared, low=0, high=limits.MAX_EXPERTS) * size}
    experts = from_config.experts(f, count, "moe_intermediate_size", routing(f), **more)
    return from_config.after_dense(lambda: from_config.dense(f), experts, from_config.dense_layers(f), num_layers)


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    attention = n.attention(qkv_bias=f.flag("attention_bias"), qk_norm="head" if f.flag("use_qk_norm") else "")
    ropes = {"global": from_config.rotations(f, n, from_config.part(f))["global"]}
    layers = [LayerSpec(attention, ffn) for ffn in feed_forwards(f, n.num_layers)]
    return from_config.model(f, outer, n, layers, ropes)


def gguf(header: GgufHeader) -> ModelSpec:
    n = header.sizes()
    experts = header.experts(ROUTING, shared=True)
    layers = [LayerSpec(header.attention(n), ffn) for ffn in header.feed_forwards(n, experts, 1)]
    return header.model(n, layers, {"global": header.rotation(n, partial=True)})


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(experts=family.GROUPED_EXPERTS, rotated=True),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers(family.SHARED_EXPERTS),
    gguf_names=family.GGUF_EXPERTS.but(family.POST_ATTENTION_NORM),
)

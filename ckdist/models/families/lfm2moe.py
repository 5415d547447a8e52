"""LFM2 with experts, except in the first layers."""

from dataclasses import replace

from ckdist.models import from_config, limits
from ckdist.models.families import family, lfm2
from ckdist.models.families.family import Fields, GgufHeader, GgufWriter
from ckdist.models.spec import DenseFfn, ModelSpec
from ckdist.program.routing import Routing

KEYS = lfm2.KEYS.but(
    defaults={
        **dict.fromkeys(("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")),
        "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "norm_topk_prob": True,
        "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
)  # fmt: skip
ROUTING = Routing(used=4, scores="sigmoid")


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f, "norm_eps")
    dense = f.integer("num_dense_layers", low=0, high=limits.MAX_LAYERS)
    routing = replace(ROUTING, renormalise=f.flag("norm_topk_prob"), scale=f.number("routed_scaling_factor", high=1e6))
    more = {"correction_bias": f.flag("use_expert_bias")}
    experts = from_config.experts(f, "num_experts", "moe_intermediate_size", routing, "silu", **more)
    first = DenseFfn(f.integer("intermediate_size", high=limits.MAX_FFN))
    ffns = from_config.after_dense(lambda: first, experts, dense, n.num_layers)
    return from_config.model(f, outer, n, lfm2.layers(f, n, ffns))


def gguf(header: GgufHeader) -> ModelSpec:
    n = header.sizes()
    ffns = header.feed_forwards(n, header.experts(ROUTING))
    return lfm2.gguf_model(header, n, ffns)


FAMILY = replace(
    lfm2.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(lfm2.hybrid_metadata, ("leading_dense_block_count", "expert_gating_func"), renormalised=False),
    safetensors=lfm2.FAMILY.safetensors.but_in_layers(
        {
            "feed_forward.gate": "mlp.gate",
            "feed_forward.expert_bias": "mlp.gate.e_score_correction.bias",
            **family.stacked("feed_forward.experts"),
            **family.numbered("feed_forward.experts", "mlp.experts"),
        }
    ),
    gguf_names=family.GGUF_EXPERTS.but(lfm2.GGUF_NORM).but_in_layers(lfm2.GGUF_NAMES),
)

"""OLMoE: experts, and norms over all heads of queries and keys."""

from ckdist.models import from_config
from ckdist.models.families import family, olmo2
from ckdist.models.families.family import Family, Fields, GgufReader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.program.routing import Routing

NAME = "olmoe"
KEYS = olmo2.KEYS.but(
    defaults={"max_position_embeddings": 4096, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01},
    aliases={"num_local_experts": "num_experts"},
)
ROUTING = Routing(used=8, renormalise=False)


def config(f: Fields, outer: Fields) -> ModelSpec:
    """Reads a config.json."""
    n = from_config.sizes(f)
    if f.has("clip_qkv"):
        raise f.error("clip_qkv", f.raw("clip_qkv"), "null: clipped queries, keys and values are not supported")
    routing = Routing(ROUTING.used, renormalise=f.flag("norm_topk_prob"))
    layer = LayerSpec(olmo2.attention(f, n), from_config.experts(f, "num_experts", "intermediate_size", routing))
    return n.model(
        NAME,
        [layer] * n.num_layers,
        from_config.rotations(f, n),
        from_config.tied(f, outer),
        **from_config.balance(f),
    )


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(ROUTING, attention={"qk_norm": "row"}),
    to_gguf=GgufWriter(experts=(), renormalised=True),
    safetensors=family.SAFETENSORS_EXPERTS,
    gguf_names=family.GGUF_EXPERTS,
)

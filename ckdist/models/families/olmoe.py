"""OLMoE: experts, and norms over all heads of queries and keys."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.families import family, olmo2
from ckdist.models.families.family import Family, Fields, GgufReader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.program.routing import Routing

KEYS = olmo2.KEYS.but(
    defaults={"max_position_embeddings": 4096, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01},
    aliases={"num_local_experts": "num_experts"},
)
ROUTING = Routing(used=8, renormalise=False)


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    routing = replace(ROUTING, renormalise=f.flag("norm_topk_prob"))
    ffn = from_config.experts(f, "num_experts", "intermediate_size", routing)
    layer = LayerSpec(from_config.attention(f, n, qk_norm="row"), ffn)
    return from_config.model(f, outer, n, [layer] * n.num_layers, **from_config.balance(f))


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(ROUTING, attention={"qk_norm": "row"}),
    to_gguf=GgufWriter(experts=(), renormalised=True),
    safetensors=family.SAFETENSORS_EXPERTS,
    gguf_names=family.GGUF_EXPERTS,
)

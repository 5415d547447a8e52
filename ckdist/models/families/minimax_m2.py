"""MiniMax-M2: many small experts, a part of each head rotated, norms over all heads of queries and keys."""

from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys, sizes
from ckdist.models.families import family, mixtral
from ckdist.models.families.family import Family, GgufReader, GgufWriter
from ckdist.models.fields import Fields
from ckdist.models.from_config import Sizes
from ckdist.models.spec import LayerSpec, ModelSpec, RopeSpec
from ckdist.program.routing import Routing

KEYS = ConfigKeys(
    {
        **sizes(kv_heads=8, head=128, positions=196608),
        "hidden_act": "silu", "num_experts_per_tok": 8, "rms_norm_eps": 1e-6, "rope_theta": 5e6,
        "router_aux_loss_coef": 0.001,
    },
    aliases={"num_experts": "num_local_experts"},
    only={
        "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True,
        "shared_intermediate_size": 0,
    },
)  # fmt: skip
ROUTING = Routing(used=8, scores="sigmoid")


def part_rotations(f: Fields, n: Sizes) -> dict[str, RopeSpec]:
    """Reads the rotation of a part of each head."""
    rotated = f.integer("rotary_dim", n.head_dim, high=limits.MAX_HEAD_DIM)
    part = f.number("partial_rotary_factor", min(1.0, rotated / n.head_dim), high=1.0)
    return from_config.rotations(f, n, part)


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    types = f.raw("attn_type_list") or []
    if not isinstance(types, list) or any(kind != 1 for kind in types):
        raise f.error("attn_type_list", types, "1 for every layer: linear attention is not supported")
    ffn = from_config.experts(f, "num_local_experts", "intermediate_size", ROUTING, correction_bias=True)
    layers = [LayerSpec(n.attention(qk_norm="row"), ffn)] * n.num_layers
    return from_config.model(f, outer, n, layers, part_rotations(f, n), **from_config.balance(f))


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=GgufReader(ROUTING, attention={"qk_norm": "row"}, rotation={"partial": True}),
    to_gguf=GgufWriter(experts=("expert_gating_func",), rotated=True),
    safetensors=mixtral.FAMILY.safetensors.but_in_layers(
        {"block_sparse_moe.e_score_correction": "mlp.gate.e_score_correction"}
    ),
    gguf_names=family.GGUF_EXPERTS,
)

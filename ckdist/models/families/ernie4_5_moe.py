"""ERNIE 4.5 with experts. Rotated pairs are neighbours; a correction bias adds to the softmax in the choice of experts.

Layers that predict further tokens (MTP) are left out.
"""

from ckdist.models import from_config, limits
from ckdist.models.config_keys import ConfigKeys
from ckdist.models.families import family
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.program.routing import Routing

KEYS = ConfigKeys(
    {
        "hidden_act": "silu", "max_position_embeddings": 131072, "moe_layer_end_index": -1,
        "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
        "num_experts_per_tok": 6, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        "router_aux_loss_coef": 0.001, "tie_word_embeddings": True,
    },
    aliases={"num_experts": "moe_num_experts", "moe_k": "num_experts_per_tok"},
    only={"moe_gate": "topk", "moe_use_aux_free": True, "use_bias": False, "use_rmsnorm": True},
    unused=("moe_capacity", "moe_gate_act", "moe_norm_min"),  # how ERNIEKit trains; the least sum of chosen shares
)  # fmt: skip
ROUTING = Routing(used=6)
WRITTEN = ("leading_dense_block_count", "expert_shared_count", "expert_shared_feed_forward_length")
CORRECTION = "mlp.moe_statics.e_score_correction"


def sparse_layers(f: Fields, num_layers: int) -> list[bool]:
    """Reads whether each layer has experts."""
    first = f.integer("moe_layer_start_index", low=0, high=limits.MAX_LAYERS)
    last = f.integer("moe_layer_end_index", low=-1, high=limits.MAX_LAYERS)
    step = f.integer("moe_layer_interval", high=limits.MAX_LAYERS)
    last = num_layers - 1 if last == -1 else last
    return [(i + 1) % step == 0 and first <= i <= last for i in range(num_layers)]


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    size = f.integer("moe_intermediate_size", high=limits.MAX_FFN)
    shared = f.integer("moe_num_shared_experts", low=0, high=limits.MAX_EXPERTS) * size
    more = {"correction_bias": True, "shared_size": shared}
    experts = from_config.experts(f, "moe_num_experts", "moe_intermediate_size", ROUTING, **more)
    dense, attention = from_config.dense(f), n.attention()
    layers = [LayerSpec(attention, experts if sparse else dense) for sparse in sparse_layers(f, n.num_layers)]
    ropes = from_config.rotations(f, n, interleaved=True)
    return from_config.model(f, outer, n, layers, ropes, **from_config.balance(f))


def gguf(header: GgufHeader) -> ModelSpec:
    f, n = header.fields, header.sizes()
    dense, experts = header.dense(), header.experts(ROUTING, shared=True)
    first = f.integer("leading_dense_block_count", 0, low=0, high=limits.MAX_LAYERS)
    step = f.integer("interleave_moe_layer_step", 1, high=limits.MAX_LAYERS)
    sparse = [i >= first and (i + 1) % step == 0 for i in range(n.num_layers)]
    layers = [LayerSpec(header.attention(n), experts if each else dense) for each in sparse]
    return header.model(n, layers, {"global": header.rotation(n, interleaved=True)})


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(lambda *_: {"interleave_moe_layer_step": 1}, experts=WRITTEN),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers(
        family.SHARED_EXPERTS | {CORRECTION: "mlp.gate.e_score_correction"},
        (r".*\.moe_statics\.e_score_correction_bias", "one_row"),
    ),
    gguf_names=family.GGUF_EXPERTS,
)

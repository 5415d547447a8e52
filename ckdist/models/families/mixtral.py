"""Mixtral: Mistral with experts. Its GGUF architecture is llama."""

from ckdist.models import from_config
from ckdist.models.families import family, llama
from ckdist.models.families.family import Family, Fields, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.program.routing import Routing

KEYS = llama.KEYS.but(
    defaults={
        "max_position_embeddings": 131072, "num_experts_per_tok": 2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "router_aux_loss_coef": 0.001,
    },
    aliases={"num_experts": "num_local_experts"},
    nulls={"num_key_value_heads": None},
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    ffn = from_config.experts(f, "num_local_experts", "intermediate_size", Routing(used=2))
    layer = LayerSpec(n.attention(window=from_config.window(f)), ffn)
    return from_config.model(f, outer, n, [layer] * n.num_layers, **from_config.balance(f))


FAMILY = Family(
    keys=KEYS,
    gguf="llama",
    from_config=config,
    to_gguf=GgufWriter(experts=(), rotated=True, factors=True, windows="sliding_window to null"),
    safetensors=family.SAFETENSORS_EXPERTS.but_in_layers(
        {"block_sparse_moe.gate": "mlp.gate", **family.numbered("block_sparse_moe.experts", "mlp.experts")}
    ),
    gguf_names=family.GGUF_EXPERTS.but({}, family.INTERLEAVED),
)

"""Mellum 2: Qwen 3 with experts, and windows in some layers. These have a rotation of their own."""

from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import exaone4, qwen3moe
from ckdist.models.families.family import Fields, GgufHeader, GgufReader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

PERIOD = 4
KEYS = qwen3moe.KEYS.but(
    defaults={
        **sizes(hidden=2304, layers=28, heads=32, head=128, positions=131072, vocab=98304),
        "decoder_sparse_step": None, "moe_intermediate_size": 896, "norm_topk_prob": True, "num_experts": 64,
        "sliding_window": 1024,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    aliases={"num_mtp_layers": "num_nextn_predict_layers"},
    unused=("mtp_layer_types", "mtp_mlp_layer_types"),
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n, window = from_config.sizes(f), from_config.window(f)
    if (types := f.raw("mlp_layer_types")) not in (None, ["sparse"] * n.num_layers):
        raise f.error("mlp_layer_types", types, "sparse in all layers")
    routing = replace(qwen3moe.ROUTING, renormalise=f.flag("norm_topk_prob"))
    ffn = from_config.experts(f, "num_experts", "moe_intermediate_size", routing)
    full, ropes = from_config.attention(f, n, qk_norm="head"), from_config.rotations(f, n)
    slide = replace(full, window=window, rope="local" if "local" in ropes else "global")
    sliding = from_config.sliding_layers(f, n.num_layers, [False] * n.num_layers)
    layers = [LayerSpec(slide if slides else full, ffn) for slides in sliding]
    return from_config.model(f, outer, n, layers, ropes, **from_config.balance(f))


def gguf(header: GgufHeader) -> ModelSpec:
    spec = header.uniform(GgufReader(qwen3moe.ROUTING))
    full, (window, sliding) = spec.layers[0].attention, header.windows(len(spec.layers), PERIOD)
    slide = replace(full, window=window, rope="local")
    spec = spec.with_layers(mixer=[slide if slides else full for slides in sliding])
    return replace(spec, ropes={**spec.ropes, "local": header.local_rotation(full.head_dim)})


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError for two bases."""
    if len({rope.theta for rope in spec.ropes.values()}) > 1:
        raise ArchitectureError(f"{where}: a Mellum whose rotations have two bases has no GGUF form")
    return exaone4.written(spec, where)


FAMILY = replace(
    qwen3moe.FAMILY,
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, experts=(), renormalised=False),
)

"""Mellum 2: Qwen 3 with experts, and windows in some layers. These have a rotation of their own."""

from dataclasses import replace
from typing import Any

from ckdist.errors import ArchitectureError
from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import exaone4, family, qwen3moe
from ckdist.models.families.family import Family, Fields, GgufHeader, GgufReader, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

NAME, PERIOD = "mellum", 4
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
    """Reads a config.json."""
    n, bias, window = from_config.sizes(f), f.flag("attention_bias"), from_config.window(f)
    if (types := f.raw("mlp_layer_types")) not in (None, ["sparse"] * n.num_layers):
        raise f.error("mlp_layer_types", types, "sparse in all layers")
    routing = replace(qwen3moe.ROUTING, renormalise=f.flag("norm_topk_prob"))
    ffn = from_config.experts(f, "num_experts", "moe_intermediate_size", routing)
    full, ropes = n.attention(qkv_bias=bias, o_bias=bias, qk_norm="head"), from_config.rotations(f, n)
    slide = replace(full, window=window, rope="local" if "local" in ropes else "global")
    sliding = from_config.sliding_layers(f, n.num_layers, [False] * n.num_layers)
    layers = [LayerSpec(slide if slides else full, ffn) for slides in sliding]
    return n.model(NAME, layers, ropes, from_config.tied(f, outer), **from_config.balance(f))


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    from ckdist.models import from_gguf

    f, spec = header.fields, from_gguf.uniform(GgufReader(qwen3moe.ROUTING), header)
    full, (window, sliding) = spec.layers[0].attention, from_gguf.windows(f, len(spec.layers), PERIOD)
    slide = replace(full, window=window, rope="local")
    layers = [replace(layer, mixer=slide if s else full) for layer, s in zip(spec.layers, sliding, strict=True)]
    local = from_gguf.plain_rotation(header, from_gguf.sizes(header))
    return replace(spec, family=NAME, layers=tuple(layers), ropes={**spec.ropes, "local": local})


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError for two bases."""
    if len({rope.theta for rope in spec.ropes.values()}) > 1:
        raise ArchitectureError(f"{where}: a Mellum whose rotations have two bases has no GGUF form")
    return exaone4.written(spec, where)


FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=gguf,
    to_gguf=GgufWriter(written, experts=(), renormalised=False),
    safetensors=family.SAFETENSORS_EXPERTS,
    gguf_names=family.GGUF_EXPERTS,
)

"""Hunyuan 4: its layers, and its form in GGUF."""

from dataclasses import replace

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models.compressed_fields import HyperConnections
from ckdist.models.compressed_gguf import HC, array
from ckdist.models.compressed_model import LIMIT
from ckdist.models.families import deepseek_v2, deepseek_v32
from ckdist.models.families.family import GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.indexer import Indexer
from ckdist.models.spec import LatentAttention, ModelSpec, MoeFfn
from ckdist.program.routing import Routing

NAME = "hy_v4"
PARTS = ("fn", "base", "scale")  # of what mixes streams
ROUTING = Routing(used=8, scores="sigmoid", scale=2.827)


def gated_model(spec: ModelSpec, f: Fields, indexer: Indexer, full: list[bool], streams: HyperConnections) -> ModelSpec:
    """Makes a model of one of DeepSeek-V3's form."""
    indexer = replace(indexer, rope_first=indexer.head_dim - spec.ropes["global"].dims, norm_eps=spec.norm_eps)
    spec, layers = deepseek_v32.with_indexers(spec, f, indexer, full), []
    for layer in spec.layers:
        assert isinstance(layer.mixer, LatentAttention)
        mixer, ffn = replace(layer.mixer, gated=True, element_gates=True, sinks=True), layer.ffn
        if isinstance(ffn, MoeFfn):
            ffn = replace(ffn, activation="clamped_silu", shared_activation="silu" if ffn.shared_size else "")
        layers.append(replace(layer, mixer=mixer, ffn=ffn))
    return replace(spec, layers=tuple(layers), streams=streams)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    f, name = header.fields, "attention.indexer.types"
    if not f.has("swiglu_clamp_exp") or (array(f, "swiglu_clamp_exp") != LIMIT).any():
        raise f.error("swiglu_clamp_exp", str(f.values.get("swiglu_clamp_exp"))[:40], f"{LIMIT:g} in all layers")
    spec, full = deepseek_v2.gguf_model(header, ROUTING, 0.0), f.raw(name)
    if not isinstance(full, np.ndarray) or full.dtype != bool or len(full) < len(spec.layers):
        raise f.error(name, str(full)[:40], f"one flag for each of {len(spec.layers)} layers")
    numbers = f.integer("hyper_connection.count", high=8), 0, f.number("hyper_connection.epsilon", high=1.0)
    streams = HyperConnections(*numbers, apart=True, magnitude=f.number("hyper_connection.magnitude", high=1e3))
    indexer = deepseek_v32.gguf_indexer(f, "global")
    return gated_model(spec, f, indexer, full[: len(spec.layers)].tolist(), streams)


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model."""
    streams = spec.streams
    assert isinstance(streams, HyperConnections)
    silu = lambda ffn: replace(ffn, activation="silu") if isinstance(ffn, MoeFfn) else ffn  # `dense` wants one for all
    plain = replace(spec, layers=tuple(replace(layer, ffn=silu(layer.ffn)) for layer in spec.layers))
    made = deepseek_v32.sparse_form(NAME, plain, where, "global")
    full = [isinstance(layer.mixer, LatentAttention) and layer.mixer.indexer is not None for layer in spec.layers]
    if not any(isinstance(layer.ffn, MoeFfn) for layer in spec.layers):
        raise ArchitectureError(f"{where}: {NAME} without experts has no GGUF form")
    more = {
        "attention.indexer.types": full,
        "hyper_connection.count": streams.count,
        "hyper_connection.epsilon": streams.eps,
        "hyper_connection.magnitude": streams.magnitude,
        "swiglu_clamp_exp": [LIMIT] * len(full),
    }
    return replace(made, metadata={**made.metadata, **{f"{NAME}.{name}": value for name, value in more.items()}})


def values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """The values of a weight in GGUF: tables, which the forward reads as vectors."""
    table = spec.streams and weight.endswith((".fn", ".hc_fn"))
    return values.reshape(-1, spec.streams.count * spec.hidden_size) if table and spec.streams else values


OF_BLOCK = {**deepseek_v32.NAMES, **HC, "attn_gate": "self_attn.g_proj", "attn_sinks.weight": "self_attn.sinks"}
NAMES = deepseek_v2.GGUF_NAMES.but_in_layers(OF_BLOCK).but(
    {f"output_hc_{part}.weight": f"model.hc_head.hc_{part}" for part in PARTS}
)

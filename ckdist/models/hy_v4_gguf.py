"""Hunyuan 4: its layers, and its form in GGUF."""

from dataclasses import replace

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models.compressed_gguf import HC, array
from ckdist.models.compressed_model import LIMIT
from ckdist.models.families import deepseek_v2, deepseek_v32
from ckdist.models.families.family import GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.indexers import Indexer
from ckdist.models.residual_streams import HyperConnections
from ckdist.models.spec import LatentAttention, ModelSpec, MoeFfn

PARTS = ("fn", "base", "scale")  # of what mixes streams


def gated_model(spec: ModelSpec, f: Fields, indexer: Indexer, full: list[bool], streams: HyperConnections) -> ModelSpec:
    """Makes a model of one of DeepSeek-V3's form."""
    indexer = replace(indexer, rope_first=indexer.head_dim - spec.ropes["global"].dims, norm_eps=spec.norm_eps)
    spec = deepseek_v32.with_indexers(spec, f, indexer, full)
    mixers = [replace(mixer, gated=True, element_gates=True, sinks=True) for mixer in spec.mixers(LatentAttention)]
    limited = lambda ffn: replace(ffn, activation="clamped_silu", shared_activation="silu" if ffn.shared_size else "")
    ffns = [limited(layer.ffn) if isinstance(layer.ffn, MoeFfn) else layer.ffn for layer in spec.layers]
    return replace(spec.with_layers(mixer=mixers, ffn=ffns), streams=streams)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    f, name = header.fields, "attention.indexer.types"
    if not f.has("swiglu_clamp_exp") or (array(f, "swiglu_clamp_exp") != LIMIT).any():
        raise f.error("swiglu_clamp_exp", str(f.values.get("swiglu_clamp_exp"))[:40], f"{LIMIT:g} in all layers")
    spec, full = deepseek_v2.gguf_model(header), f.raw(name)
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
    plain = spec.with_layers(ffn=[silu(layer.ffn) for layer in spec.layers])
    full = [mixer.indexer is not None for mixer in spec.mixers(LatentAttention)]
    if not spec.mixtures():
        raise ArchitectureError(f"{where}: hy_v4 without experts has no GGUF form")
    more = {
        "attention.indexer.types": full,
        "hyper_connection.count": streams.count,
        "hyper_connection.epsilon": streams.eps,
        "hyper_connection.magnitude": streams.magnitude,
        "swiglu_clamp_exp": [LIMIT] * len(full),
    }
    return deepseek_v32.sparse_form("hy_v4", plain, where, "global", more)


def values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """The values of a weight in GGUF: tables, which the forward reads as vectors."""
    table = spec.streams and weight.endswith((".fn", ".hc_fn"))
    return values.reshape(-1, spec.streams.count * spec.hidden_size) if table and spec.streams else values


OF_BLOCK = {**deepseek_v32.NAMES, **HC, "attn_gate": "self_attn.g_proj", "attn_sinks.weight": "self_attn.sinks"}
NAMES = deepseek_v2.GGUF_NAMES.but_in_layers(OF_BLOCK).but(
    {f"output_hc_{part}.weight": f"model.hc_head.hc_{part}" for part in PARTS}
)

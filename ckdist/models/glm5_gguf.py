"""GLM-5.3-Flash: its layers, and its form in GGUF."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import from_config, limits, rope
from ckdist.models.compressed_gguf import HC, array
from ckdist.models.compressed_model import LIMIT, read_streams
from ckdist.models.families import deepseek_v2, deepseek_v32, kimi_linear
from ckdist.models.families.family import GROUPED_EXPERTS, SIGMOID, GgufForm, GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.indexers import Indexer
from ckdist.models.residual_streams import HyperConnections
from ckdist.models.spec import Attention, Ffn, LatentAttention, LayerSpec, Mixer, ModelSpec
from ckdist.models.state_mixers import GatedDeltaNet

ACTIVATION = "clamped_silu"
NORM_EPS = 1e-6  # of the layer norm of index keys


def pooled_model(
    n: from_config.Sizes, mixers: Sequence[Mixer], ffns: Sequence[Ffn], tied: bool, streams: HyperConnections
) -> ModelSpec:
    """Makes a model. No layer uses its rotation."""
    layers = [LayerSpec(mixer, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]
    return n.model(layers, {"global": rope.unscaled(8, 1e4, interleaved=True)}, tied, streams=streams)


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    f, name = header.fields, "attention.head_count_kv"
    counts, key = array(f, name), f.integer("attention.key_length_mla", high=limits.MAX_HEAD_DIM)
    width = dict.fromkeys(("attention.key_length", "attention.value_length"), key)
    n = header.but({name: 1, **width}).sizes()
    if len(counts) < n.num_layers:
        raise f.error(name, f"{len(counts)} values", f"one for each of {n.num_layers} layers")
    for clamp in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        if not f.has(clamp) or (array(f, clamp) != LIMIT).any():
            raise f.error(clamp, str(f.values.get(clamp))[:40], f"{LIMIT:g} in all layers")
    f.integer("rope.dimension_count", 0, low=0, high=0)
    types = f.raw("attention.indexer.types")
    eps = f.number("attention.layer_norm_epsilon", NORM_EPS, high=1.0)
    if not np.isclose(eps, NORM_EPS, rtol=1e-3):
        raise f.error("attention.layer_norm_epsilon", eps, f"{NORM_EPS:g}")
    if not f.flag("attention.indexer.kpool_select_tail", True) or not np.all(True if types is None else types):
        raise f.error("attention.indexer.kpool_select_tail", False, "true, and attention.indexer.types true")
    pool = f.integer("attention.indexer.kpool", low=2, high=1 << 16)
    indexer = replace(deepseek_v32.gguf_indexer(f, "global"), rope=None, pool=pool)
    size = lambda name, high: f.integer(f"attention.{name}", high=high)
    full = LatentAttention(
        n.num_heads, size("kv_lora_rank", limits.MAX_LATENT), key, 0, size("value_length_mla", limits.MAX_HEAD_DIM),
        key**-0.5, size("q_lora_rank", limits.MAX_WIDTH), None, indexer=checked(indexer, f, "attention.indexer."),
    )  # fmt: skip
    width, taps = kimi_linear.gguf_widths(f)
    floor = f.number("kda.gate_lower_bound", 0.0, low=-1e3, high=0.0)
    net = GatedDeltaNet(n.num_heads, n.num_heads, width, width, taps, by_row=True, gate_rank=width, decay_floor=floor)
    ffns = header.feed_forwards(n, replace(header.experts(SIGMOID, shared=True), activation=ACTIVATION), 0, ACTIVATION)
    names = ("count", "sinkhorn_iterations", "epsilon")
    streams = replace(read_streams(f, *(f"hyper_connection.{name}" for name in names)), mean=True)
    mixers = [full if has else net for has in counts[: n.num_layers].tolist()]
    return pooled_model(n, mixers, ffns, header.tied(), streams)


def checked(i: Indexer, f: Fields, prefix: str, kpool: str = "kpool", key: str = "key_length") -> Indexer:
    """The indexer. Raises ModelFileError for sizes that cannot be computed. The names are those of fields."""
    if i.top_k % i.pool or (16 % i.pool and i.pool % 16) or i.pool == 1:
        raise f.error(f"{prefix}{kpool}", i.pool, f"a divisor of the {i.top_k} positions, and 2, 4, 8 or 16 each")
    if i.head_dim % 16:
        raise f.error(f"{prefix}{key}", i.head_dim, "a multiple of 16")
    return i


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model. Raises ArchitectureError if GGUF cannot describe it."""
    from ckdist.models import to_gguf

    full, net = next(iter(spec.mixers(LatentAttention)), None), next(iter(spec.mixers(GatedDeltaNet)), None)
    streams = spec.streams
    if full is None or net is None or not spec.mixtures() or full.num_heads != net.num_value_heads:
        raise ArchitectureError(f"{where}: one kind of layer alone, or with other heads, has no GGUF form")
    assert full.indexer and isinstance(streams, HyperConnections)
    cached = Attention(full.num_heads, 1, full.kv_lora_rank, 1.0)  # has the sizes that `dense` reads
    shaped = replace(spec.with_layers(mixer=[cached] * len(spec.layers)), ropes={})
    names = [name for name in GROUPED_EXPERTS if "group" not in name]
    count, i = len(spec.layers), full.indexer
    more = {
        **to_gguf.experts(shaped, where, names),
        "attention.head_count_kv": [int(layer.mixer is full) for layer in spec.layers],
        "attention.key_length_mla": full.nope_dim,
        "attention.value_length_mla": full.v_dim,
        "attention.kv_lora_rank": full.kv_lora_rank,
        "attention.q_lora_rank": full.q_lora_rank,
        "attention.layer_norm_epsilon": NORM_EPS,
        **deepseek_v32.written_indexer(i),
        "attention.indexer.kpool": i.pool,
        "attention.indexer.kpool_select_tail": True,
        "rope.dimension_count": 0,
        "kda.head_dim": net.key_dim,
        "ssm.conv_kernel": net.conv_kernel,
        **({"kda.gate_lower_bound": net.decay_floor} if net.decay_floor else {}),
        "hyper_connection.count": streams.count,
        "hyper_connection.sinkhorn_iterations": streams.iterations,
        "hyper_connection.epsilon": streams.eps,
        "swiglu_clamp_exp": [LIMIT] * count,
        "swiglu_clamp_shexp": [LIMIT] * count,
    }
    return to_gguf.dense("glm5-next", shaped, where, more)


def values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF."""
    part = weight.rpartition(".")[2]
    if part == "fn" and spec.streams:
        return values.reshape(-1, spec.streams.count * spec.hidden_size)
    mixer = spec.layer_of(weight).mixer if part == "pool_bias" else None
    if isinstance(mixer, LatentAttention) and mixer.indexer:
        return values.reshape(mixer.indexer.pool, -1)
    values = kimi_linear.gguf_values(spec, weight, values)
    return values.reshape(-1) if part == "A_log" else values


POOL = {"gate": "pool_gate.weight", "ape": "pool_bias"}
INDEX = {f"indexer_compressor_{name}.weight": f"self_attn.indexer.{part}" for name, part in POOL.items()}
NAMES = deepseek_v2.GGUF_NAMES.but_in_layers(
    {**kimi_linear.PARTS, **deepseek_v32.NAMES, **HC, **INDEX}, (r".*\.A_log", "minus_exp")
)

"""DeepSeek-V4 as GGUF: metadata, and the names and shapes of tensors."""

from dataclasses import replace

import numpy as np

from ckdist.errors import ArchitectureError
from ckdist.models import limits, rope
from ckdist.models.compressed_fields import CompressedAttention
from ckdist.models.compressed_model import KINDS, LIMIT, compressed_model, read_streams
from ckdist.models.families import deepseek_v32
from ckdist.models.families.family import GGUF_EXPERTS, GROUPED_EXPERTS, GgufForm, GgufHeader, in_layers
from ckdist.models.fields import Fields
from ckdist.models.residual_streams import HyperConnections
from ckdist.models.spec import Attention, ModelSpec
from ckdist.program.routing import Routing

ARCHITECTURE = "deepseek4"
GGUF_WINDOW = ("kv", "gate", "ape.weight", "norm")
WINDOW = ("wkv", "wgate", "ape", "norm")


def array(f: Fields, name: str) -> np.ndarray:
    """Reads an array of numbers. Raises ModelFileError for another value."""
    value = f.raw(name)
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "fiu":
        raise f.error(name, str(value)[:40], "an array of numbers")
    return value


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    f, n = header.fields, header.sizes()
    ratios = array(f, "attention.compress_ratios")
    given = ratios[: n.num_layers].tolist()
    if len(given) < n.num_layers or any(ratio not in KINDS for ratio in given):
        raise f.error("attention.compress_ratios", given, f"{n.num_layers} of 0, 4 and 128")
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        if f.has(name) and (limit := array(f, name)[array(f, name) != LIMIT]).size:
            raise f.error(name, limit[0].item(), f"{LIMIT:g} in all layers")
    dims = f.integer("rope.dimension_count", high=n.head_dim)
    numbers = ("q_lora_rank", "output_group_count", "output_lora_rank", "sliding_window")
    rank, groups, o_rank, window = (f.integer(f"attention.{name}", high=limits.MAX_WIDTH) for name in numbers)
    plain = CompressedAttention(n.num_heads, n.head_dim, dims, rank, groups, o_rank, window, "local")
    indexer = deepseek_v32.gguf_indexer(f, "global")
    of_ratio = lambda ratio: replace(
        plain, rope="global", ratio=ratio, overlap=ratio == 4, indexer=indexer if ratio == 4 else None
    )
    ffn = header.experts(Routing(6, "sqrt_softplus", scale=1.5), shared=True)
    if ffn.routing.scores != "sqrt_softplus" or not ffn.routing.renormalise:
        raise f.error("expert_gating_func", ffn.routing.scores, "4 (sqrt_softplus), with expert_weights_norm true")
    hashed = f.integer("hash_layer_count", low=0, high=n.num_layers)
    theta = f.number("attention.compress_rope_freq_base", 160000.0, low=1.0)
    scaled = header.but({"rope.freq_base": theta})
    ropes = {
        "global": replace(scaled.rotation(n, partial=True, interleaved=True), magnitude=1.0),
        "local": rope.unscaled(dims, f.number("rope.freq_base", 1e4, low=1.0), interleaved=True),
    }
    mixers = [of_ratio(ratio) if ratio else plain for ratio in given]
    of_streams = read_streams(f, *(f"hyper_connection.{name}" for name in ("count", "sinkhorn_iterations", "epsilon")))
    by_id = [i < hashed for i in range(n.num_layers)]
    return compressed_model(
        n,
        mixers,
        replace(ffn, correction_bias=True, activation="clamped_silu"),
        by_id,
        ropes,
        header.tied(),
        of_streams,
    )


def export(spec: ModelSpec, where: str) -> GgufForm:
    """Returns the GGUF metadata of a model. Raises ArchitectureError if GGUF cannot describe it."""
    from ckdist.models import to_gguf

    mixers, ffns = spec.mixers(CompressedAttention), spec.mixtures()
    a, streams, local = mixers[0], spec.streams, spec.ropes["local"]
    unscaled = np.allclose(local.inverse_frequencies, rope.plain(local.dims, local.theta), rtol=1e-5)
    assert isinstance(streams, HyperConnections)
    indexer = next((mixer.indexer for mixer in mixers if mixer.indexer), None)
    hashed = [bool(ffn.hashed) for ffn in ffns]
    for lacks, what in (
        (not {(m.ratio, m.overlap) for m in mixers} <= {(0, False), (4, True), (128, False)}, "other compress_rates"),
        (indexer is None, "no layer with an indexer"),
        (hashed != sorted(hashed, reverse=True), "hash_moe layers after others"),
        (not unscaled or any(one.magnitude != 1.0 for one in spec.ropes.values()), "other scaled rotations"),
        (spec.tie_embeddings, "tied embeddings"),
    ):
        if lacks:
            raise ArchitectureError(f"{where}: {spec.family} with {what} has no GGUF form")
    assert indexer is not None
    cached, best = Attention(a.num_heads, 1, a.head_dim, 1.0), replace(ffns[-1], correction_bias=True, hashed=0)
    plain = spec.with_layers(mixer=[cached] * len(mixers), ffn=[best] * len(mixers))
    experts = to_gguf.experts(plain, where, [name for name in GROUPED_EXPERTS[1:] if "group" not in name])
    count, own = len(mixers), to_gguf.dense(ARCHITECTURE, plain, where)
    more = {
        **experts,
        "rope.freq_base": float(local.theta),
        "rope.dimension_count": a.rope_dim,
        "swiglu_clamp_exp": [LIMIT] * count,
        "swiglu_clamp_shexp": [LIMIT] * count,
        "attention.q_lora_rank": a.q_rank,
        "attention.sliding_window": a.window,
        "attention.output_group_count": a.groups,
        "attention.output_lora_rank": a.o_rank,
        **deepseek_v32.written_indexer(indexer),
        "attention.compress_ratios": [mixer.ratio for mixer in mixers],
        "attention.compress_rope_freq_base": float(spec.ropes["global"].theta),
        "hyper_connection.count": streams.count,
        "hyper_connection.sinkhorn_iterations": streams.iterations,
        "hyper_connection.epsilon": streams.eps,
        "hash_layer_count": sum(hashed),
        "embedding_length_out": streams.count * spec.hidden_size,
    }
    kept = {name: value for name, value in own.metadata.items() if not name.endswith(".attn_factor")}
    return replace(own, metadata={**kept, **{f"{ARCHITECTURE}.{name}": value for name, value in more.items()}})


def values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """The values of a weight in GGUF: tables, which the forward reads as vectors."""
    name = weight.rpartition(".")[2]
    if name in ("fn", "hc_fn") and spec.streams:
        return values.reshape(-1, spec.streams.count * spec.hidden_size)
    if name == "position_bias":
        return values.reshape(spec.mixers(CompressedAttention)[int(weight.split(".")[2])].ratio, -1)
    if name == "tid2eid":
        return values.reshape(spec.vocab_size, -1)
    return values


def windows(stored: str, weights: str, names: tuple[str, ...] = GGUF_WINDOW) -> dict[str, str]:
    """Names of the weights that make entries: `names` begin with `stored`."""
    parts = ("kv_proj", "gate_proj", "position_bias", "kv_norm")
    return {f"{stored}{name}": f"{weights}.{part}" for name, part in zip(names, parts, strict=True)}


HC_STORED = {f"hc_{part}_{name}": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")}
HC = {f"{stored}.weight": weight for stored, weight in HC_STORED.items()}
OF_BLOCK = {
    **HC,
    "attn_sinks.weight": "self_attn.sinks",
    "attn_q_a_norm": "self_attn.q_a_norm",
    "attn_kv": "self_attn.kv_proj",
    "attn_kv_a_norm": "self_attn.kv_norm",
    **{f"attn_q_{part}": f"self_attn.q_{part}_proj" for part in "ab"},
    **{f"attn_output_{part}": f"self_attn.o_{part}_proj" for part in "ab"},
    **windows("attn_compressor_", "self_attn.compressor"),
    **windows("indexer_compressor_", "self_attn.compressor.indexer"),
    "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj",
    "indexer.proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "ffn_gate_tid2eid.weight": "mlp.gate.tid2eid",
}
NAMES = GGUF_EXPERTS.but({
    **in_layers("blk", OF_BLOCK),
    **{f"output_hc_{name}.weight": f"model.hc_head.hc_{name}" for name in ("fn", "base", "scale")},
})  # fmt: skip

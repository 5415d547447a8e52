"""Qwen3.8-Flash-Next in GGUF, and checks of its numbers."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import ArchitectureError, ModelFileError
from ckdist.models import limits
from ckdist.models.compressed_gguf import array
from ckdist.models.families import family, qwen35
from ckdist.models.families.family import GgufHeader
from ckdist.models.fields import Fields
from ckdist.models.gated_fields import GatedStreams, Ngrams
from ckdist.models.indexers import MeanIndexer
from ckdist.models.spec import Attention, LayerSpec, ModelSpec, RopeSpec
from ckdist.models.state_mixers import GatedDeltaNet
from ckdist.program.routing import Routing

TABLE = "per_layer_token_embd.weight"
HASHES = r".*\.ple_embedding\.(layer_multipliers|ngram_heads_(vocab_sizes|offsets))"  # tensors of hashes' constants
INDEX = ("indexer.head_count", "indexer.key_length", "indexer.top_k", "compress_ratios")


def begins(sizes: Sequence[int]) -> tuple[int, ...]:
    """The first row of each hash, if their rows follow one another."""
    return tuple(itertools.accumulate((0, *sizes[:-1])))


def whole(f: Fields, name: str) -> list[int]:
    """Reads a list of whole numbers that are not negative."""
    values = array(f, name)
    if values.dtype.kind not in "iu" or (values < 0).any():
        raise f.error(name, str(values)[:80], "a list of whole numbers, none of them negative")
    return values.tolist()


def check(i: MeanIndexer, rope: RopeSpec, f: Fields, names: Sequence[str]) -> None:
    """Raises ModelFileError for sizes of an indexer that cannot be computed. `names`: of its fields in the file."""
    if i.block not in (2, 4, 8, 16) and i.block % 16:
        raise f.error(names[3], i.block, "2, 4, 8, 16 or a multiple of 16")
    if i.top_k % i.block:
        raise f.error(names[2], i.top_k, f"a multiple of {i.block}, the size of a block")
    if i.head_dim % 16 or i.head_dim < rope.dims or i.num_heads * i.head_dim > limits.MAX_WIDTH:
        raise f.error(names[1], i.head_dim, f"a multiple of 16 and at least the {rope.dims} rotated elements")


def gguf(header: GgufHeader) -> ModelSpec:
    """Reads GGUF metadata."""
    f, n = header.fields, header.sizes()
    rope = qwen35.gguf_rotation(header, n)
    names = tuple(f"attention.{name}" for name in INDEX)
    ratios = whole(f, names[3])
    mixers = qwen35.gguf_mixers(header, n, tiled=True, output_gate="sigmoid")
    blocks = {ratio for ratio, one in zip(ratios, mixers, strict=False) if isinstance(one, Attention)}
    if len(ratios) < n.num_layers or len(blocks) != 1:
        raise f.error(names[3], str(ratios)[:80], f"one number in all layers with attention, of {n.num_layers} layers")
    known = f.but({names[3]: blocks.pop()})
    indexer = MeanIndexer(*(known.integer(name, high=limits.MAX_POSITION) for name in names))
    check(indexer, rope, f, names)
    ffn = header.experts(Routing(used=10), shared=True)
    sparse = lambda one: replace(one, indexer=indexer) if isinstance(one, Attention) else one
    layers = [LayerSpec(sparse(one), ffn) for one in mixers]
    count, rank = (f.integer(f"hyper_connection.{name}", high=1 << 16) for name in ("count", "low_rank"))
    if not 1 < count <= 8:
        raise f.error("hyper_connection.count", count, "from 2 to 8")
    streams = GatedStreams(count, rank, ngrams(header, n.num_layers))
    return header.model(n, layers, {"global": rope}, streams=streams)


def ngrams(header: GgufHeader, layers: int) -> Ngrams | None:
    """Reads the embeddings of n-grams. Raises ModelFileError if their numbers do not fit together."""
    f = header.fields
    if not f.has("ple.layers"):
        return None
    given = whole(f, "ple.layers")
    if len(given) != 1 or given[0] >= layers:
        raise f.error("ple.layers", given, f"one number of a layer, below {layers}")
    tokens, each = (f.integer(f"ple.{name}", low=1, high=64) for name in ("ngram_size", "heads_per_ngram"))
    count, shape = (tokens - 1) * each, header.dims.get(TABLE, ())
    lists = [tuple(whole(f, f"ple.{name}")) for name in ("layer_multipliers", "head_vocab_sizes", "head_offsets")]
    fits = [len(one) == wanted for one, wanted in zip(lists, (tokens, count, count), strict=True)]
    if not 2 <= tokens <= 8 or not 0 < count <= 64 or not all(fits):
        raise f.error("ple.ngram_size", tokens, "from 2 to 8, with a factor for each token and 64 hashes at most")
    if (
        min(lists[1]) < 1
        or max(lists[0]) >> 63
        or len(shape) != 2
        or max(map(sum, zip(*lists[1:], strict=True))) > shape[1]
    ):
        raise ModelFileError(f"{f.where}: hashes of n-grams go beyond the {shape} elements of {TABLE}")
    f.integer("embedding_length_per_layer_input", shape[0], low=shape[0], high=shape[0])
    end = f.integer("ple.eos_token_id", low=0, high=limits.MAX_VOCAB)
    taps = f.integer("ple.conv_kernel", high=limits.MAX_CONV)
    return Ngrams(given[0], shape[0], shape[1], 0, each, end, taps, *lists)


def written(spec: ModelSpec, where: str) -> dict[str, Any]:
    """Further GGUF metadata. Raises ArchitectureError for a model that this metadata cannot describe."""
    more, streams = qwen35.written(spec, where), spec.streams
    full, linear = spec.mixers(Attention), spec.mixers(GatedDeltaNet)[0]
    if linear.output_gate != "sigmoid" or not full:
        raise ArchitectureError(f"{where}: {spec.family} has no GGUF form unless output_gate_type is sigmoid")
    i = full[0].indexer
    assert isinstance(i, MeanIndexer) and isinstance(streams, GatedStreams)
    ratios = [i.block if isinstance(layer.mixer, Attention) else 0 for layer in spec.layers]
    more |= {f"attention.{name}": v for name, v in zip(INDEX, (i.num_heads, i.head_dim, i.top_k, ratios), strict=True)}
    more |= {"hyper_connection.count": streams.count, "hyper_connection.low_rank": streams.rank}
    n = streams.ngrams
    if n is None:
        return more
    values = {
        "layers": [n.layer],
        "ngram_size": n.dilation,
        "heads_per_ngram": n.each,
        "conv_kernel": n.taps,
        "eos_token_id": n.end,
        "layer_multipliers": np.array(n.multipliers, np.uint64),
        "head_offsets": np.array(n.offsets, np.uint64),
        "head_vocab_sizes": np.array(n.sizes, np.uint64),
    }
    return {**more, "embedding_length_per_layer_input": n.width, **{f"ple.{name}": v for name, v in values.items()}}


def values(spec: ModelSpec, weight: str, values: np.ndarray) -> np.ndarray:
    """Converts the values of a weight for GGUF."""
    if weight.endswith(".ple.conv1d.weight") and isinstance(spec.streams, GatedStreams) and spec.streams.ngrams:
        return values.reshape(-1, spec.streams.ngrams.taps)
    return qwen35.gguf_values(spec, weight, values)


HC = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up", "inject": "block_inject_weight"}
NAMES = qwen35.GGUF.but(
    {
        **family.EXPERTS,
        "per_layer_token_embd": "model.embed_ngrams",
        **{f"output_hc_{part}": f"model.hyper_connection_mixer.{name}" for part, name in HC.items()},
    }
).but_in_layers(
    {
        **{f"hc_attn_{part}": f"attn_hyper_connection.{name}" for part, name in HC.items()},
        **{f"hc_ffn_{part}": f"mlp_hyper_connection.{name}" for part, name in HC.items()},
        **{f"indexer.{part}": f"self_attn.index_{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")},
        **{f"ple_{part}": f"ple.{part}" for part in ("norm_key", "norm_query", "norm_conv", "conv1d")},
        **{f"ple_{part}": f"ple.{part}_proj" for part in ("key", "value")},
    }
)

"""Embeddings of n-grams: ngram_rows reads rows of a table, convolve_streams mixes rows of nearby tokens.

Both keep the last tokens or rows of each sequence, on every rank. Neither has a gradient.
"""

from collections.abc import Sequence

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.cache import CacheArray, LayerCache
from ckdist.program.lowered import MatrixKey
from ckdist.program.ops.delta_rule import silu
from ckdist.program.ops.op import ServingLowering, lower, op, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.step import MatrixIndex


def infer_ngram_rows(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, rows * width), with a row for each hash. Raises LayoutError if a hash can be beyond the table."""
    (ids,), (table,) = inputs, weights
    *parts, width = (dim.elements for dim in table.dims)
    last = max(size + offset for size, offset in zip(attrs["sizes"], attrs["offsets"], strict=True))
    if last > np.prod(parts, dtype=np.int64) or any(dim.axis for dim in table.dims):
        raise LayoutError(f"ngram_rows: hashes up to {last} are no rows of {table}")
    return [((ids.dims[0], Dim("ngrams", len(attrs["sizes"]), width)), None)]


@op("ngram_rows", infer_ngram_rows, collective=True)
def ngram_rows(contexts: Sequence[RankContext], inputs: list[Arrays], attrs: Attrs) -> list[Arrays]:
    """The rows of the table at the hashes of each token and those before it.

    Hash h is of the last 2 + h // each tokens: (t[0] * multipliers[0]) xor (t[1] * multipliers[1]) ... modulo sizes[h],
    plus offsets[h], where t[i] is i tokens before. Tokens before the sequence, and up to an earlier `end` token, are
    `end`.
    """
    sharded = attrs["inputs"][0].dims[0].axis
    ids = np.concatenate([own[0] for own in inputs]) if sharded else inputs[0][0]
    place, end, back = (attrs["layer"], "ids"), attrs["end"], len(attrs["multipliers"]) - 1
    before = contexts[0].states.get(place, np.full(back, end, np.int32))
    history = np.concatenate([before, ids])
    rows = np.empty((len(ids), len(attrs["sizes"])), np.int64)
    for t in range(len(ids)):
        tokens = [int(token) for token in history[t : t + back + 1][::-1]]
        if end in tokens[1:]:
            first = tokens.index(end, 1)
            tokens[first:] = [end] * (len(tokens) - first)
        for h, (size, offset) in enumerate(zip(attrs["sizes"], attrs["offsets"], strict=True)):
            mixed = 0
            for token, factor in zip(tokens[: 2 + h // attrs["each"]], attrs["multipliers"], strict=False):
                mixed ^= token * factor % (1 << 64)
            rows[t, h] = mixed % size + offset
    results = []
    for context, own, (table,) in zip(contexts, inputs, attrs["arrays"], strict=True):
        context.states[place] = history[len(history) - back :]
        first = context.first_token if sharded else 0
        chosen = rows[first : first + len(own[0])]
        results.append([table.reshape(-1, table.shape[-1])[chosen].reshape(len(chosen), -1)])
    return results


@lower("ngram_rows", "inference")
def lower_ngram_rows(lowering: ServingLowering, group: Group) -> None:
    """Emits one step. The table is read in its file."""
    instr, table = group.instr, group.instr.weight(0)
    attrs, (place,) = instr.attrs, lowering.own_rows(*instr.outputs)
    key = MatrixKey(table.name, *((0, dim.elements) for dim in table.dims[-2:]))
    lists = {name: np.array(attrs[name], np.int64) for name in ("multipliers", "sizes", "offsets")}
    lowering.emit(
        "ngram_rows",
        out=place,
        table=MatrixIndex(lowering.matrix([key]).first),
        layer=attrs["layer"],
        tokens=len(attrs["multipliers"]),
        heads=len(attrs["sizes"]),
        each=attrs["each"],
        end=attrs["end"],
        **lists,
    )
    _keep(lowering, attrs["layer"], CacheArray("index_rows", 1, 1, len(attrs["multipliers"]), "sequence"))


def _keep(lowering: ServingLowering, layer: int, array: CacheArray) -> None:
    """Adds an array to a cache."""
    lowering.caches[layer] = LayerCache((array,)).with_index(lowering.caches.get(layer))


def infer_convolve_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The columns of the rows, for the tokens of this rank. Raises LayoutError if a rank lacks tokens or columns."""
    (rows,), (kernel,) = inputs, weights
    unsharded("convolve_streams", rows)
    if rows.dims[0].axis or kernel.dims[0].elements != rows.dims[-1].elements * attrs["taps"]:
        raise LayoutError(f"convolve_streams: [{rows.dims[0]}, {rows.dims[-1]}] and {kernel} do not fit together")
    return [((attrs["tokens"], rows.dims[-1]), None)]


@op("convolve_streams", infer_convolve_streams)
def convolve_streams(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """silu(sum over i of w[:, i] * rows[t - (taps - 1 - i) * dilation]), with zeros before the sequence."""
    ((rows,), (kernel,)), taps, step = (inputs, weights), attrs["taps"], attrs["dilation"]
    kernel = kernel.reshape(rows.shape[1], taps)
    every = context.with_last(attrs["layer"], "rows", rows, (taps - 1) * step)
    parts = [kernel[:, i] * every[i * step : i * step + len(rows)] for i in range(taps)]
    begin, end = context.rows(attrs["tokens"].axis, len(rows))
    return [silu(np.sum(parts, axis=0))[begin:end]]


@lower("convolve_streams", "inference")
def lower_convolve_streams(lowering: ServingLowering, group: Group) -> None:
    instr, attrs = group.instr, group.instr.attrs
    (rows,), (place,) = instr.inputs, lowering.own_rows(*instr.outputs)
    columns, sizes = rows.dims[-1].elements, {name: attrs[name] for name in ("layer", "taps", "dilation")}
    kernel = lowering.vector(instr.weights[0])
    lowering.emit("convolve_streams", rows=lowering.place_of(rows), out=place, conv=kernel, **sizes)
    kept = CacheArray("rows", 1, columns, (attrs["taps"] - 1) * attrs["dilation"] + 1, "sequence")
    _keep(lowering, attrs["layer"], kept)

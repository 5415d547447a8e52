"""Streams of hidden states that gates of low rank read: add_streams, read_streams, gate_streams.

None has a gradient.
"""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.op import ServingLowering, lower, op, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.ops.rms_norm import inverse_rms
from ckdist.program.program import Value
from ckdist.program.step import ABSENT, ValueIndex


def _check(name: str, wide: Value, inputs: Values, weights: Weights, count: int) -> None:
    """Raises LayoutError unless all operands are whole, and weights have an element for each of `wide`."""
    for value in inputs:
        unsharded(name, value)
    columns = wide.dims[-1].elements
    if columns % count or any(w.dims[0].elements != columns for w in weights):
        given = ", ".join(map(str, weights))
        raise LayoutError(f"{name}: {count} streams in [{wide.dims[-1]}] do not fit {given or 'it'}")


def normed_streams(x: np.ndarray, weight: np.ndarray, count: int, eps: float) -> np.ndarray:
    """rms_norm of each of the `count` parts of a row, with weights of its own."""
    parts = x.reshape(len(x), count, -1)
    return (parts * inverse_rms(parts, eps)).reshape(x.shape) * weight


def infer_add_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The streams; with a weight also their norm. Raises LayoutError if the operands do not fit together."""
    y, *before = inputs
    count = attrs["streams"]
    wide = before[0] if before else Value("streams", (y.dims[0], Dim("streams", count, y.dims[-1].elements)))
    _check("add_streams", wide, inputs, weights, count)
    per_stream = len(before) != 1
    fits = y.dims[-1].elements * (count if per_stream else 1) == wide.dims[-1].elements
    if not fits or (len(before) > 1 and before[1].dims[-1].elements != count):
        raise LayoutError(f"add_streams: [{y.dims[-1]}] cannot be added to {count} streams in [{wide.dims[-1]}]")
    return [(wide.dims, None)] * (1 + len(weights))


@op("add_streams", infer_add_streams)
def add_streams(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Inputs: y, the streams x, and a coefficient for each stream.

    Stream i becomes x[i] + y * 2 sigmoid(coefficient i). Without coefficients y has a row for each stream; without x
    all streams are y. The second result is the norm of each stream / number of streams.
    """
    y, *before = inputs
    count = attrs["streams"]
    if len(before) != 1:
        factor = 2 / (1 + np.exp(-before[1])) if before else np.ones((len(y), count), y.dtype)
        y = (factor[..., None] * y[:, None]).reshape(len(y), -1)
    x = y + before[0] if before else y
    return [x, *(normed_streams(x, w, count, attrs["eps"]) / np.float32(count) for w in weights)]


@lower("add_streams", "inference")
def lower_add_streams(lowering: ServingLowering, group: Group) -> None:
    """Emits one step."""
    instr, absent = group.instr, ValueIndex(ABSENT)
    y, *before = map(lowering.place_of, instr.inputs)
    places = lowering.own_rows(*instr.outputs)
    x, coefs, count = *before, *[absent] * (2 - len(before)), instr.attrs["streams"]
    lowering.emit(
        "add_streams",
        x=x,
        y=y,
        coefs=coefs,
        sum=places[0],
        normed=places[1] if len(places) > 1 else absent,
        norm=lowering.vector(instr.weights[0] if instr.weights else None),
        streams=count,
        eps=instr.attrs["eps"],
        factor=1 / count,
    )


def infer_read_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, width of a stream)."""
    x, gates = inputs
    _check("read_streams", x, inputs, weights, attrs["streams"])
    if gates.dims[-1].elements != x.dims[-1].elements:
        raise LayoutError(f"read_streams: gates [{gates.dims[-1]}] of [{x.dims[-1]}]")
    return [((x.dims[0], attrs["hidden"]), None)]


@op("read_streams", infer_read_streams)
def read_streams(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum over streams of sigmoid(gate) * x, for each column."""
    x, gates = inputs
    return [(x / (1 + np.exp(-gates))).reshape(len(x), attrs["streams"], -1).sum(axis=1)]


@lower("read_streams", "inference")
def lower_read_streams(lowering: ServingLowering, group: Group) -> None:
    """Emits one step."""
    x, gates = map(lowering.place_of, group.instr.inputs)
    (out,) = lowering.own_rows(*group.instr.outputs)
    lowering.emit("read_streams", x=x, gates=gates, out=out, streams=group.instr.attrs["streams"])


def infer_gate_streams(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The streams, and a row of the same width."""
    x, key, value = inputs
    _check("gate_streams", x, inputs, weights, attrs["streams"])
    if (
        key.dims[-1].elements != x.dims[-1].elements
        or value.dims[-1].elements * attrs["streams"] != x.dims[-1].elements
    ):
        raise LayoutError(f"gate_streams: [{key.dims[-1]}] and [{value.dims[-1]}] do not fit [{x.dims[-1]}]")
    return [(x.dims, None), (x.dims, None)]


@op("gate_streams", infer_gate_streams)
def gate_streams(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """A gate for each stream scales a value that is added to it. The second result is the norm of the scaled value.

    Inputs: the streams x, a key for each stream, a value. Weights: the norms of keys, of x and of the result. With
    s = key . x / sqrt(width), both normed, the gate is sigmoid(sign(s) * sqrt(max(|s|, 1e-6))).
    """
    (x, key, value), (key_norm, query_norm, rows_norm), count = inputs, weights, attrs["streams"]
    normed = lambda x, w: normed_streams(x, w, count, attrs["eps"])
    products = (normed(key, key_norm) * normed(x, query_norm)).reshape(len(x), count, -1)
    score = products.sum(axis=-1) / np.float32(value.shape[1] ** 0.5)
    score = np.sign(score) * np.sqrt(np.maximum(np.abs(score), np.float32(1e-6)))
    added = (value[:, None] / (1 + np.exp(-score[..., None]))).reshape(x.shape)
    return [x + added, normed(added, rows_norm)]


@lower("gate_streams", "inference")
def lower_gate_streams(lowering: ServingLowering, group: Group) -> None:
    """Emits one step. Rows are in a slot if an all_to_all exchanges them."""
    instr, attrs = group.instr, group.instr.attrs
    x, key, value = map(lowering.place_of, instr.inputs)
    total, rows = instr.outputs
    places = {"sum": lowering.own_rows(total)[0], "rows": lowering.result(rows)}
    norms = zip(("key_norm", "query_norm", "rows_norm"), map(lowering.vector, instr.weights), strict=True)
    lowering.emit("gate_streams", x=x, key=key, value=value, **places, **dict(norms), **attrs)

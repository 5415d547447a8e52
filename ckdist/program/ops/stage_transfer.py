"""recv and send between pipeline stages: rows forward, gradients backward.

Each rank of a stage receives a part of the rows, from the rank with the same index in the other stage. Its value has
zeros in all other rows, so the value is partial, like an embedding with a sharded vocabulary. Rows of several values
lie side by side in a message. A tally of experts, if there is one, goes with the rows; each rank receives all of it.
"""

import itertools
from dataclasses import replace

import numpy as np

from ckdist.layout import Dim, even_ranges
from ckdist.program.ops.op import ServingLowering, TrainingLowering, lower, op, unsharded, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value
from ckdist.program.step import ABSENT, ValueIndex


def received_dims(*values: Value) -> dict[str, Dim | tuple[Dim, ...]]:
    """The attributes of a `recv` with the dimensions of rows, of `more` rows and of the optional tally."""
    first, *more = (value.dims[1] for value in values if len(value.dims) > 1)
    tally = [value.dims[0] for value in values if len(value.dims) == 1]
    return {"hidden": first} | ({"more": tuple(more)} if more else {}) | ({"tally": tally[0]} if tally else {})


def infer_recv(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden), (tokens, dim) for each dim of `more`, and a tally if `attrs` has its dimension.

    The rows are partial over `axis`, whose ranks each receive a part of them. None: a rank receives all its rows.
    """
    rows = [((inputs[0].dims[0], dim), attrs["axis"]) for dim in (attrs["hidden"], *attrs.get("more", ()))]
    return rows if "tally" not in attrs else [*rows, ((attrs["tally"],), None)]


@op("recv", infer_recv)
def recv(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The received rows of this rank, zeros in other rows, and the tally. `context.received` has all rows."""
    received = context.received[attrs["stage"]]
    begin, end = (0, len(received[0])) if attrs["axis"] is None else _own_rows(context, attrs["axis"], len(received[0]))
    own = (np.arange(len(received[0])) >= begin) & (np.arange(len(received[0])) < end)
    return [value * own[:, None] if value.ndim == 2 else value for value in received]


def _own_rows(context: RankContext, axis: str, count: int) -> tuple[int, int]:
    """The rows [begin, end) that this rank's peer in the other stage sends."""
    return even_ranges(count, context.mesh.size(axis))[context.mesh.index(axis)]


@lower("recv", "inference")
def lower_recv(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, and one for each of several values."""
    values = group.instr.outputs
    rows = _side_by_side(values)
    lowering.emit("recv", out=lowering.result(rows))
    for value, begin in _columns(values):
        (out,) = lowering.own_rows(value)
        lowering.emit("copy_columns", **lowering.residual(rows).fields(), out=out, first=begin, first_out=0)


def _side_by_side(values: Values) -> Value:
    """The rows of a message: those of all values, or of the only one."""
    if len(values) == 1:
        return values[0]
    dim = Dim("packed", sum(value.dims[-1].elements for value in values))
    return replace(values[0], name=f"{values[0].name}.packed", dims=(values[0].dims[0], dim))


def _columns(values: Values) -> list[tuple[Value, int]]:
    """Each of several values, and its first column in a message."""
    first = itertools.accumulate((value.dims[-1].elements for value in values), initial=0)
    return list(zip(values, first, strict=False)) if len(values) > 1 else []


@lower("recv", "training")
def lower_recv_rows(lowering: TrainingLowering, instr: Instr) -> None:
    peer, tag = lowering.message(instr.attrs["stage"], lowering.chunk)
    is_shared = instr.attrs["axis"] is not None
    rows, tally, *_ = *map(lowering.output, instr.outputs), ValueIndex(ABSENT)
    lowering.emit("recv_rows", out=rows, tally=tally, peer=peer, tag=tag, shared=is_shared)


@vjp("recv")
def recv_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """Sends the gradients back to the stage that sent the values."""
    names = ["d_sent", "d_tally_sent"][: len(grads)]
    g.emit("send", grads, names=names, to=instr.attrs["stage"], axis=instr.attrs["axis"])
    return [None]


def infer_send(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The same dims. Raises LayoutError if a value is partial or its columns are sharded."""
    for value in inputs:
        unsharded("send", value)
    return [(value.dims, None) for value in inputs]


@op("send", infer_send)
def send(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The values that the next stage receives."""
    return inputs


@lower("send", "inference")
def lower_send(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, which also computes the residual that it sends. Before it one for each of several values."""
    values = group.instr.inputs
    rows = _side_by_side(values)
    if len(values) > 1:
        lowering.own_rows(rows)
    for value, begin in _columns(values):
        out = lowering.at[rows.name]
        lowering.emit("copy_columns", **lowering.residual(value).fields(), out=out, first=0, first_out=begin)
    lowering.emit("send", **lowering.residual(rows).fields())


@lower("send", "training")
def lower_send_rows(lowering: TrainingLowering, instr: Instr) -> None:
    peer, tag = lowering.message(lowering.chunk, instr.attrs["to"])
    is_shared = instr.attrs["axis"] is not None
    rows, tally, *_ = map(lowering.place_of, (*instr.inputs, None))
    lowering.emit("send_rows", x=rows, tally=tally, peer=peer, tag=tag, shared=is_shared)


@vjp("send")
def send_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """The gradients that the next stage sends back. The backward pass begins with them."""
    return [*grads]

"""recv and send between pipeline stages: rows forward, gradients backward.

Each rank of a stage receives a part of the rows, from the rank with the same index in the other stage. Its value has
zeros in all other rows, so the value is partial, like an embedding with a sharded vocabulary. A tally of experts, if
there is one, goes with the rows; each rank receives all of it.
"""

import numpy as np

from ckdist.layout import Dim, even_ranges
from ckdist.program.ops.op import ServingLowering, TrainingLowering, lower, op, unsharded, vjp, whole
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value
from ckdist.program.step import ABSENT, ValueIndex


def received_dims(rows: Value, *tally: Value) -> dict[str, Dim]:
    """The attributes of a `recv` with the dimensions of the rows and of the optional tally."""
    dims = {"hidden": rows.dims[1]}
    return {**dims, "tally": tally[0].dims[0]} if tally else dims


def infer_recv(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden), and a tally if `attrs` has its dimension.

    The rows are partial over `axis`, whose ranks each receive a part of them. None: a rank receives all its rows.
    """
    rows = ((inputs[0].dims[0], attrs["hidden"]), attrs["axis"])
    return [rows] if "tally" not in attrs else [rows, ((attrs["tally"],), None)]


@op("recv", infer_recv)
def recv(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The received rows of this rank, zeros in other rows, and the tally. `context.received` has all rows."""
    received, *tally = context.received[attrs["stage"]]
    rows = np.zeros_like(received)
    begin, end = (0, len(rows)) if attrs["axis"] is None else _own_rows(context, attrs["axis"], len(rows))
    rows[begin:end] = received[begin:end]
    return [rows, *tally]


def _own_rows(context: RankContext, axis: str, count: int) -> tuple[int, int]:
    """The rows [begin, end) that this rank's peer in the other stage sends."""
    return even_ranges(count, context.mesh.size(axis))[context.mesh.index(axis)]


@lower("recv", "inference")
def lower_recv(lowering: ServingLowering, group: Group) -> None:
    """Emits one step."""
    value = group.instr.outputs[0]
    (lowering.at[value.name],) = lowering.results([value])
    lowering.emit("recv", out=lowering.at[value.name])


@lower("recv", "training")
def lower_recv_rows(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step."""
    peer, tag = lowering.message(instr.attrs["stage"], lowering.chunk)
    is_shared = instr.attrs["axis"] is not None
    rows, *tally = map(lowering.output, instr.outputs)
    of_tally = tally[0] if tally else ValueIndex(ABSENT)
    lowering.emit("recv_rows", out=rows, tally=of_tally, peer=peer, tag=tag, shared=is_shared)


@vjp("recv")
def recv_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """Sends the gradients back to the stage that sent the values."""
    names = ["d_sent", "d_tally_sent"][: len(grads)]
    g.emit("send", grads, names=names, to=instr.attrs["stage"], axis=instr.attrs["axis"])
    return [None]


def infer_send(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The same dims. Raises LayoutError if a value is partial or its columns are sharded."""
    whole("send", *inputs)
    unsharded("send", inputs[0])
    return [(value.dims, None) for value in inputs]


@op("send", infer_send)
def send(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The values that the next stage receives."""
    return inputs


@lower("send", "inference")
def lower_send(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, which also computes the residual that it sends."""
    lowering.emit("send", **lowering.residual(group.instr.inputs[0]).fields())


@lower("send", "training")
def lower_send_rows(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step."""
    peer, tag = lowering.message(lowering.chunk, instr.attrs["to"])
    is_shared = instr.attrs["axis"] is not None
    rows, *tally = map(lowering.place_of, instr.inputs)
    of_tally = tally[0] if tally else ValueIndex(ABSENT)
    lowering.emit("send_rows", x=rows, tally=of_tally, peer=peer, tag=tag, shared=is_shared)


@vjp("send")
def send_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """The gradients that the next stage sends back. The backward pass begins with them."""
    return [*grads]

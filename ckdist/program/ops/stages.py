"""recv and send: what a stage gets from the previous one, and gives the next; in a backward pass gradients the other
way.

The ranks of a stage share the rows: each receives its own from the rank with the same place in the other stage. What it
has is a summand of the whole, as an embedding of a part of the vocabulary is.
"""

from typing import TYPE_CHECKING

import numpy as np

from ckdist.layout import even_ranges
from ckdist.program.ops.op import Arrays, Attrs, Gradients, Inferred, Values, Weights, lower, op, unsharded, vjp, whole
from ckdist.program.program import Instr, Value
from ckdist.program.rank_context import RankContext

if TYPE_CHECKING:  # which import the ops
    from ckdist.program.emitter import Emitter
    from ckdist.program.fusion import Group
    from ckdist.program.lower import Lowering
    from ckdist.program.lower_training import TrainingLowering


def infer_recv(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden), partial over `axis`, among whose ranks the rows are shared; None: a rank has all of its own."""
    return [((inputs[0].dims[0], attrs["hidden"]), attrs["axis"])]


@op("recv", infer_recv)
def recv(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """This rank's rows of what was sent, and zeros; `context.received`: of all ranks of the stage."""
    received = context.received[attrs["stage"]]
    rows = np.zeros_like(received)
    begin, end = (0, len(rows)) if attrs["axis"] is None else _own_rows(context, attrs["axis"], len(rows))
    rows[begin:end] = received[begin:end]
    return [rows]


def _own_rows(context: RankContext, axis: str, count: int) -> tuple[int, int]:
    """The rows that this rank's peer in the other stage has, [begin, end)."""
    return even_ranges(count, context.mesh.size(axis))[context.mesh.index(axis)]


@lower("recv", "inference")
def lower_recv(lowering: "Lowering", group: "Group") -> None:
    """A step."""
    value = group.instr.outputs[0]
    (lowering.at[value.name],) = lowering.results([value])
    lowering.emit("recv", out=lowering.at[value.name])


@lower("recv", "training")
def lower_recv_rows(lowering: "TrainingLowering", instr: Instr) -> None:
    """A step."""
    peer, tag = lowering.message(instr.attrs["stage"], lowering.chunk)
    is_shared = instr.attrs["axis"] is not None
    lowering.emit("recv_rows", out=lowering.output(instr.outputs[0]), peer=peer, tag=tag, shared=is_shared)


@vjp("recv")
def recv_vjp(g: "Emitter", instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """The gradient goes back to where the value came from."""
    g.emit("send", (grads[0],), names=["d_sent"], to=instr.attrs["stage"], axis=instr.attrs["axis"])
    return [None]


def infer_send(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The same value; LayoutError where it is partial or its columns are sharded."""
    whole("send", inputs[0])
    unsharded("send", inputs[0])
    return [(inputs[0].dims, None)]


@op("send", infer_send)
def send(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """What the next stage receives."""
    return [inputs[0]]


@lower("send", "inference")
def lower_send(lowering: "Lowering", group: "Group") -> None:
    """A step, which makes the residual that it sends."""
    lowering.emit("send", **lowering.residual(group.instr.inputs[0]).fields())


@lower("send", "training")
def lower_send_rows(lowering: "TrainingLowering", instr: Instr) -> None:
    """A step."""
    peer, tag = lowering.message(lowering.chunk, instr.attrs["to"])
    is_shared = instr.attrs["axis"] is not None
    lowering.emit("send_rows", x=lowering.value(instr.inputs[0]), peer=peer, tag=tag, shared=is_shared)


@vjp("send")
def send_vjp(g: "Emitter", instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """The gradient that comes back from there, with which a backward pass begins."""
    return [grads[0]]

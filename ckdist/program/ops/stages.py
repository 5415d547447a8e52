"""recv and send: what a stage gets from the previous one, and gives the next.

The ranks of a stage share the rows: each receives its own from the rank with the same place in the previous stage. What
it has is a summand of the whole, as an embedding of a part of the vocabulary is.
"""

from typing import TYPE_CHECKING

import numpy as np

from ckdist.layout import even_ranges
from ckdist.program.ops.op import Arrays, Attrs, Inferred, Values, Weights, lower, op, unsharded, whole
from ckdist.program.rank_context import RankContext

if TYPE_CHECKING:  # which import the ops
    from ckdist.program.fusion import Group
    from ckdist.program.lower import Lowering


def infer_recv(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden), partial over `axis`, among whose ranks the rows are shared; None: a rank has all of its own."""
    return [((inputs[0].dims[0], attrs["hidden"]), attrs["axis"])]


@op("recv", infer_recv)
def recv(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """This rank's rows of what was sent, and zeros; `context.received`: of all ranks of the stage."""
    rows = np.zeros_like(context.received)
    begin, end = (0, len(rows)) if attrs["axis"] is None else _own_rows(context, attrs["axis"], len(rows))
    rows[begin:end] = context.received[begin:end]
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

"""embed, and input_rows: rows of hidden states that a batch brings, one for each token."""

from typing import Any

import numpy as np

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.program.lowered import MatrixKey
from ckdist.program.ops.op import ServingLowering, TrainingLowering, lower, op, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value
from ckdist.program.rotations import NO_ROPE
from ckdist.program.step import ABSENT, NO_SPAN, MatrixIndex


def infer_hidden_rows(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden), whole."""
    return [((inputs[0].dims[0], attrs["hidden"]), None)]


def infer_embed(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden), partial if the vocabulary is sharded. Raises LayoutError if tokens are sharded over the same
    axis.
    """
    (ids,), (table,) = inputs, weights
    if ids.dims[0].axis and ids.dims[0].axis == table.dims[0].axis:
        raise LayoutError(
            f"embed: tokens and {table} are both sharded over {ids.dims[0].axis}, "
            "so no rank has the rows of its tokens; read the table whole"
        )
    return [((ids.dims[0], table.dims[1]), table.dims[0].axis)]


@op("embed", infer_embed)
def embed(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Rows of the table. Ids in another rank's shard get zeros. With `eps`: row / sqrt(mean(row^2) + eps)."""
    (ids,), (table,) = inputs, weights
    begin, end = context.share(attrs["weights"][0].dims[0])
    mine = (ids >= begin) & (ids < end)
    rows = np.zeros((len(ids), table.shape[1]), table.dtype)  # (tokens, hidden)
    rows[mine] = table[ids[mine] - begin]
    if eps := attrs.get("eps", 0.0):
        rows = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + np.float32(eps))
    return [rows]


@lower("embed", "inference")
def lower_embed(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, with the scale that follows."""
    instr, scale = group.instr, group["scale"]
    table, out = instr.weight(0), instr.outputs[0]
    pieces, columns = lowering.pieces(table.dims[0]), (0, table.dims[1].elements)
    emit_embed(
        lowering,
        out,
        table=lowering.matrix([MatrixKey(table.name, rows, columns) for rows in pieces]),
        first_row=pieces[0][0],
        scale=scale.attrs["factor"] if scale else 1.0,
        eps=instr.attrs.get("eps", 0.0),
    )
    if scale:
        lowering.stands_for(scale.outputs[0], scale.inputs[0])


def emit_embed(lowering: ServingLowering, out: Value, **fields: Any) -> None:
    """Emits a step of the kind `embed`. The default of its fields: no table, position or rotation."""
    place = lowering.result(out)
    neutral = {"by": False, "table": NO_SPAN, "waves": NO_ROPE, "added": MatrixIndex(ABSENT), "first_row": 0}
    lowering.emit("embed", out=place, **{**neutral, "scale": 1.0, "eps": 0.0, **fields})


@lower("embed", "training")
def lookup(lowering: TrainingLowering, instr: Instr) -> None:
    table = instr.weight(0)
    first, _ = table.dims[0].span(lowering.mesh)
    lowering.emit("lookup", out=lowering.output(instr.outputs[0]), table=lowering.parameter(table), first_row=first)


@vjp("embed")
def embed_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction, for the gradient of the table."""
    table = instr.weight(0)
    return [None, *g.emit("embed_grad", (instr.inputs[0], grads[0]), names=[f"d_{table.name}"], vocab=table.dims[0])]


@op("input_rows", infer_hidden_rows)
def input_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The rows of this rank's tokens."""
    begin = context.first_token
    return [context.input_rows[begin : begin + len(inputs[0])]]


@lower("input_rows", "inference")
def lower_input_rows(lowering: ServingLowering, group: Group) -> None:
    emit_embed(lowering, group.instr.outputs[0], by=native.lib.ckdist_embed_by_place)

"""embed and its gradient, and embeddings of positions."""

from typing import TYPE_CHECKING

import numpy as np

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.lowered import MatrixKey
from ckdist.program.ops.op import lower, op, total, vjp, whole
from ckdist.program.ops.op_types import Arrays, Attrs, Gradients, Inferred, Values, Weights
from ckdist.program.program import Instr, Value, Weight
from ckdist.program.rank_context import RankContext
from ckdist.program.rotations import NO_ROPE, ROPE_TABLES
from ckdist.program.step import ABSENT, NO_SPAN, MatrixIndex

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.emitter import Emitter
    from ckdist.program.fusion import Group
    from ckdist.program.lower import ServingLowering
    from ckdist.program.lower_training import TrainingLowering


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
    """Rows of the table. Ids in another rank's shard of the vocabulary get zeros."""
    (ids,), (table,) = inputs, weights
    begin, end = context.share(attrs["weights"][0].dims[0])
    mine = (ids >= begin) & (ids < end)
    rows = np.zeros((len(ids), table.shape[1]), table.dtype)  # (tokens, hidden)
    rows[mine] = table[ids[mine] - begin]
    return [rows]


@lower("embed", "inference")
def lower_embed(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step, with the scale that follows."""
    instr, scale = group.instr, group["scale"]
    table, out = instr.weight(0), instr.outputs[0]
    pieces, columns = lowering.pieces(table.dims[0]), (0, table.dims[1].elements)
    (lowering.at[out.name],) = lowering.results([out])
    lowering.emit(
        "embed",
        out=lowering.at[out.name],
        by=False,
        waves=NO_ROPE,
        added=MatrixIndex(ABSENT),
        table=lowering.matrix([MatrixKey(table.name, rows, columns) for rows in pieces]),
        first_row=pieces[0][0],
        scale=scale.attrs["factor"] if scale else 1.0,
    )
    if scale:
        lowering.stands_for(scale.outputs[0], scale.inputs[0])


def infer_embed_positions(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden), whole."""
    return [((inputs[0].dims[0], _columns(*weights)), None)]


def _columns(*tables: Weight | None) -> Dim:
    """The columns of the tables, which are equal. One table may be None."""
    (columns,) = {table.dims[1] for table in tables if table is not None}
    return columns


@op("embed_positions", infer_embed_positions)
def embed_positions(
    context: RankContext, inputs: Arrays, weights: list[np.ndarray | None], attrs: Attrs
) -> list[np.ndarray]:
    """positions[position + first] + types[t], with t = 1 for tokens of a second text, else 0. One table may be None."""
    ids, (table, types), begin = inputs[0], weights, context.first_token
    positions = context.positions[begin : begin + len(ids)]
    second = np.zeros(len(ids), int) if context.first_text is None else (positions >= context.first_text).astype(int)
    rows = [] if table is None else [table[positions + attrs["first"]]]
    return [total([*rows, *([] if types is None else [types[np.minimum(second, len(types) - 1)]])])]


@lower("embed_positions", "inference")
def lower_embed_positions(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step of the kind `embed`."""
    positions: Weight | None = group.instr.weights[0]
    types: Weight | None = group.instr.weights[1]
    (out,) = group.instr.outputs
    table, added = (positions, types) if positions else (types, None)
    assert table is not None  # checked by `infer`
    whole_table = lambda w: lowering.matrix([MatrixKey(w.name, *((0, dim.elements) for dim in w.dims))])
    (lowering.at[out.name],) = lowering.results([out])
    lowering.emit(
        "embed",
        out=lowering.at[out.name],
        by=native.lib.ckdist_embed_by_position if positions else native.lib.ckdist_embed_by_type,
        table=whole_table(table),
        waves=NO_ROPE,
        added=whole_table(added).first if added else MatrixIndex(ABSENT),
        first_row=-group.instr.attrs["first"] if positions else 0,
        scale=1.0,
    )


def infer_embed_waves(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden), whole."""
    return [((inputs[0].dims[0], attrs["hidden"]), None)]


@op("embed_waves", infer_embed_waves)
def embed_waves(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """[sin(angles), cos(angles)] of each token. Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    In the paper, sines and cosines alternate.
    """
    cos, sin = context.rope_tables(context.rope(attrs["table"]))
    begin = context.first_token
    return [np.concatenate([sin, cos], axis=-1)[begin : begin + len(inputs[0])]]


@lower("embed_waves", "inference")
def lower_embed_waves(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step of the kind `embed`, without a table."""
    (out,) = group.instr.outputs
    (lowering.at[out.name],) = lowering.results([out])
    lowering.emit(
        "embed",
        out=lowering.at[out.name],
        by=native.lib.ckdist_embed_by_position,
        waves=ROPE_TABLES[group.instr.attrs["table"]],
        table=NO_SPAN,
        added=MatrixIndex(ABSENT),
        first_row=0,
        scale=1.0,
    )


@lower("embed", "training")
def lookup(lowering: "TrainingLowering", instr: Instr) -> None:
    """Emits one step."""
    table = instr.weight(0)
    first, _ = table.dims[0].span(lowering.mesh)
    lowering.emit("lookup", out=lowering.output(instr.outputs[0]), table=lowering.parameter(table), first_row=first)


@vjp("embed")
def embed_vjp(g: "Emitter", instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction, for the gradient of the table."""
    table = instr.weight(0)
    return [None, *g.emit("embed_grad", (instr.inputs[0], grads[0]), names=[f"d_{table.name}"], vocab=table.dims[0])]


def infer_embed_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the table, partial if tokens are sharded."""
    ids, dy = inputs
    whole("embed_grad", dy)
    return [((attrs["vocab"], dy.dims[-1]), ids.dims[0].axis)]


@op("embed_grad", infer_embed_grad)
def embed_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Adds the row of each token to the row of its id, in token order, for ids in the rank's shard."""
    ids, dy = inputs
    begin, end = context.share(attrs["vocab"])
    mine = (ids >= begin) & (ids < end)
    table = np.zeros((end - begin, dy.shape[1]), dy.dtype)  # (vocab, hidden)
    np.add.at(table, ids[mine] - begin, dy[mine])
    return [table]


@lower("embed_grad", "training")
def lower_embed_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """Emits one step, which adds to the gradient of the table."""
    table = instr.outputs[0]
    lowering.is_fresh(table)
    first, _ = instr.attrs["vocab"].span(lowering.mesh)
    dy = lowering.place_of(instr.inputs[1])
    lowering.emit("embed_grad", dy=dy, gradient=lowering.gradient(table), first_row=first)

"""Embeddings of positions, and of the first and the second text."""

from collections.abc import Sequence

import numpy as np

from ckdist import native
from ckdist.program.lowered import MatrixKey
from ckdist.program.ops.embedding import emit_embed, infer_hidden_rows
from ckdist.program.ops.op import ServingLowering, lower, op, total
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values
from ckdist.program.program import Weight
from ckdist.program.rotations import ROPE_TABLES
from ckdist.program.step import ABSENT, MatrixIndex


def infer_embed_positions(inputs: Values, weights: Sequence[Weight | None], attrs: Attrs) -> Inferred:
    """(tokens, hidden), whole."""
    (columns,) = {table.dims[1] for table in weights if table is not None}
    return [((inputs[0].dims[0], columns), None)]


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
def lower_embed_positions(lowering: ServingLowering, group: Group) -> None:
    """Emits one step of the kind `embed`."""
    (positions, types), (out,) = group.instr.weights, group.instr.outputs
    table, added = (positions, types) if positions else (types, None)
    assert table is not None  # checked by `infer`
    whole_table = lambda w: lowering.matrix([MatrixKey(w.name, *((0, dim.elements) for dim in w.dims))])
    emit_embed(
        lowering,
        out,
        by=native.lib.ckdist_embed_by_position if positions else native.lib.ckdist_embed_by_type,
        table=whole_table(table),
        added=whole_table(added).first if added else MatrixIndex(ABSENT),
        first_row=-group.instr.attrs["first"] if positions else 0,
    )


@op("embed_waves", infer_hidden_rows)
def embed_waves(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """[sin(angles), cos(angles)] of each token. Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    In the paper, sines and cosines alternate.
    """
    cos, sin = context.rope_tables(context.rope(attrs["table"]))
    begin = context.first_token
    return [np.concatenate([sin, cos], axis=-1)[begin : begin + len(inputs[0])]]


@lower("embed_waves", "inference")
def lower_embed_waves(lowering: ServingLowering, group: Group) -> None:
    waves = ROPE_TABLES[group.instr.attrs["table"]]
    emit_embed(lowering, group.instr.outputs[0], by=native.lib.ckdist_embed_by_position, waves=waves)

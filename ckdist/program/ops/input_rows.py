"""input_rows: rows of hidden states that a batch brings, one for each token."""

from ckdist import native
from ckdist.program.ops.embedding import emit_embed, infer_hidden_rows
from ckdist.program.ops.op import ServingLowering, lower, op
from ckdist.program.ops.op_types import Arrays, Attrs, Group, RankContext


@op("input_rows", infer_hidden_rows)
def input_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The rows of this rank's tokens."""
    begin = context.first_token
    return [context.input_rows[begin : begin + len(inputs[0])]]


@lower("input_rows", "inference")
def lower_input_rows(lowering: ServingLowering, group: Group) -> None:
    """Emits one step."""
    emit_embed(lowering, group.instr.outputs[0], by=native.lib.ckdist_embed_by_place)

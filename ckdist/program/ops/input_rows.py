"""input_rows: rows of hidden states that a batch brings, one for each token."""

from ckdist import native
from ckdist.program.ops.op import ServingLowering, lower, op
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, Values, Weights
from ckdist.program.rank_context import RankContext
from ckdist.program.rotations import NO_ROPE
from ckdist.program.step import ABSENT, NO_SPAN, MatrixIndex


def infer_input_rows(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, hidden), whole."""
    return [((inputs[0].dims[0], attrs["hidden"]), None)]


@op("input_rows", infer_input_rows)
def input_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The rows of this rank's tokens."""
    begin = context.first_token
    return [context.input_rows[begin : begin + len(inputs[0])]]


@lower("input_rows", "inference")
def lower_input_rows(lowering: ServingLowering, group: Group) -> None:
    """Emits one step."""
    embed_without_table(lowering, group, native.lib.ckdist_embed_by_place, NO_ROPE)


def embed_without_table(lowering: ServingLowering, group: Group, by: int, waves: int) -> None:
    """Emits a step of the kind `embed`. `waves`: the rotation whose sines and cosines are the rows, or NO_ROPE."""
    (out,) = group.instr.outputs
    (lowering.at[out.name],) = lowering.results([out])
    lowering.emit(
        "embed",
        out=lowering.at[out.name],
        by=by,
        waves=waves,
        table=NO_SPAN,
        added=MatrixIndex(ABSENT),
        first_row=0,
        scale=1.0,
        eps=0.0,
    )

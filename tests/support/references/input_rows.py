"""The definitions in numpy of the ops in `ckdist/program/ops/input_rows.py`."""

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("input_rows")
def input_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The rows of this rank's tokens."""
    begin = context.first_token
    return [context.input_rows[begin : begin + len(inputs[0])]]

"""The definitions in numpy of the ops in `ckdist/program/ops/dropout.py`."""

from ckdist.program.ops.dropout import dropped
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("dropout")
def dropout(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x / (1 - probability) where an element is kept, else 0; x if there are no keys."""
    x, keys = inputs
    return [dropped(x, keys, attrs, attrs["columns"].span(context.mesh)[0])]

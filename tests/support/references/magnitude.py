"""The definitions in numpy of the ops in `ckdist/program/ops/magnitude.py`."""

from collections.abc import Sequence

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference, total
from tests.support.references.collectives import in_groups


@reference("row_norms")
def row_norms(contexts: Sequence[RankContext], inputs: list[Arrays], attrs: Attrs) -> list[Arrays]:
    """The norms of the rows of w + scale * b @ a, (rows,). Ranks that shard the columns add their squares."""
    axis, scale = attrs["weights"][0].dims[1].axis, np.float32(attrs["scale"])
    squares = [[np.square(w + scale * (b @ a)).sum(axis=1)] for w, a, b in attrs["arrays"]]
    squares = in_groups(contexts, squares, axis, total) if axis else squares
    return [[np.sqrt(own)] for (own,) in squares]


@reference("magnitude")
def magnitude(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns the product of the values * magnitude / norms + bias. Either weight may be absent."""
    *values, norms = inputs
    (m, bias), has = weights, [weight is not None for weight in attrs["weights"]]
    y = values[0] if len(values) == 1 else values[0] * values[1]
    y = y * ((m if has[0] else 1) / norms)
    return [y + bias if has[1] else y]

"""The definitions in numpy of the ops in `ckdist/program/ops/cut_rows.py`."""

import numpy as np

from ckdist.layout import FFN_UNIT
from ckdist.program.ops.cut_rows import _blocks
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("column_sums")
def column_sums(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum and the sum of squares of each block; 0 for blocks of other ranks. It has no gradient."""
    (x,), dim = inputs, attrs["inputs"][0].dims[-1]
    out = np.zeros((len(x), _blocks(dim.elements), 2), x.dtype)
    first, _ = context.share(dim)
    for begin in range(0, x.shape[-1], FFN_UNIT):
        block = x[:, begin : begin + FFN_UNIT]
        out[:, (first + begin) // FFN_UNIT] = np.stack([block.sum(axis=-1), (block * block).sum(axis=-1)], axis=-1)
    return [out.reshape(len(x), -1)]


@reference("cut_rows")
def cut_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """max(x - mean - deviations * std, 0), with the mean and standard deviation of a row. It has no gradient."""
    x, sums = inputs
    columns = attrs["inputs"][0].dims[-1].elements
    total, squares = sums.astype(np.float64).reshape(len(x), -1, 2).sum(axis=1).T[:, :, None] / columns
    cut = total + attrs["deviations"] * np.sqrt(np.maximum(squares - total**2, 0))
    return [np.maximum(x - cut.astype(x.dtype), 0)]

"""The definitions in numpy of the ops in `ckdist/program/ops/output_rows.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("output_rows")
def output_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The identity."""
    return inputs


@reference("mean_rows")
def mean_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Replaces each row by the mean of the sequence's rows."""
    return [np.tile(inputs[0].mean(axis=0, dtype=np.float64).astype(inputs[0].dtype), (len(inputs[0]), 1))]

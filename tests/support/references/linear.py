"""The definitions in numpy of the ops in `ckdist/program/ops/linear.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("linear")
def linear(context: RankContext, inputs: Arrays, weights: list[np.ndarray | None], attrs: Attrs) -> Arrays:
    """Returns x @ w.T + bias for each (w, bias). If the input is sharded, only the first rank adds the bias."""
    (x,) = inputs
    count = len(weights) // 2
    results = []
    for w, bias, declared in zip(weights[:count], weights[count:], attrs["weights"][:count], strict=True):
        assert w is not None  # only biases are optional
        y = x @ w.T  # (tokens, out)
        if bias is not None and context.adds_bias(declared.dims[1]):
            y = y + bias
        results.append(y)
    return results

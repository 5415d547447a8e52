"""The definitions in numpy of the ops in `ckdist/program/ops/rms_norm_grad.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.rms_norm import inverse_rms


@reference("rms_norm_grad")
def rms_norm_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With r = 1 / rms(x) and n = x * r: dx = r * (dy * w - n * mean(dy * w * n)) and dw = sum over rows of dy * n.

    dw only with `weight_grad`.
    """
    (x, dy), (w,) = inputs, weights
    rows, dy_rows = x.reshape(-1, w.shape[-1]), dy.reshape(-1, w.shape[-1])  # (tokens * groups, n)
    r = inverse_rms(rows, attrs["eps"])
    n, dn = rows * r, dy_rows * w
    dx = (r * (dn - n * np.mean(dn * n, axis=-1, keepdims=True))).reshape(x.shape)
    return [dx, (dy_rows * n).sum(axis=0)] if attrs["weight_grad"] else [dx]

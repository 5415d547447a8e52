"""The definitions in numpy of the ops in `ckdist/program/ops/rms_norm.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("rms_norm")
def rms_norm(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x / sqrt(mean(x^2) + eps) * w, over the last dimension or per head. Zhang & Sennrich 2019,
    arXiv:1910.07467.
    """
    (x,), (w,) = inputs, weights
    rows = x.reshape(-1, w.shape[-1])  # (tokens * groups, n)
    return [(rows * inverse_rms(rows, attrs["eps"]) * w).reshape(x.shape)]


def inverse_rms(rows: np.ndarray, eps: float) -> np.ndarray:
    """1 / sqrt(mean(row^2) + eps): (rows, n) -> (rows, 1)."""
    return 1 / np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + np.float32(eps))

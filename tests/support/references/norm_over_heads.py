"""The definitions in numpy of the ops in `ckdist/program/ops/norm_over_heads.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("sum_squares")
def sum_squares(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum of squares of each head. 0 for heads of other ranks, and for a kv-head that a lower rank has too."""
    q_dim, k_dim = (value.dims[-1] for value in attrs["inputs"])
    (begin, end), (first, _) = context.share(q_dim), context.share(k_dim)
    out = np.zeros((len(inputs[0]), q_dim.count + k_dim.count), inputs[0].dtype)
    out[:, begin:end] = (inputs[0] ** 2).reshape(len(out), end - begin, q_dim.width).sum(axis=-1)
    keys = (inputs[1] ** 2).reshape(len(out), -1, k_dim.width).sum(axis=-1)
    group = q_dim.count // k_dim.count
    for h in range(keys.shape[1]):
        if (first + h) * group >= begin:
            out[:, q_dim.count + first + h] = keys[:, h]
    return [out]


@reference("rms_norm_heads")
def rms_norm_heads(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x / sqrt(mean(x^2) + eps) * w over all heads of a token, for queries and keys. The sums of squares are
    given.
    """
    *parts, squares = inputs
    dims = [value.dims[-1] for value in attrs["inputs"][:2]]
    results, at = [], 0
    for x, w, dim in zip(parts, weights, dims, strict=True):
        mean = squares[:, at : at + dim.count].sum(axis=-1, keepdims=True) / dim.elements
        results.append(x / np.sqrt(mean + np.float32(attrs["eps"])) * w)
        at += dim.count
    return results

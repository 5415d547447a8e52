"""The definitions in numpy of the ops in `ckdist/program/ops/streams.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("mix_streams")
def mix_streams(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Xie et al. 2025, arXiv:2512.24880 (mHC). It has no gradient.

    Inputs: y, the result of a part of a layer, and that part's streams x and coefficients (post, comb).
    Stream i becomes post[i] * y + sum over j of comb[j, i] * x[j]; without x it is y. Then w = fn * streams /
    rms(streams) in three parts, times their `scale`, plus `base`: pre = sigmoid + eps, post = 2 sigmoid, and comb with
    rows and columns of sum 1, by divisions of a softmax. The result is the sum of pre[i] * stream i.
    """
    y, *before = inputs
    (fn, base, scale), count, eps = weights, attrs["streams"], np.float32(attrs["eps"])
    if before:
        post, comb = before[1][:, :count], before[1][:, count:].reshape(-1, count, count)
        streams = post[..., None] * y[:, None] + np.einsum("tji,tjd->tid", comb, before[0].reshape(len(y), count, -1))
    else:
        streams = np.repeat(y[:, None], count, axis=1)
    flat = streams.reshape(len(y), -1)
    w = flat @ fn.reshape(-1, flat.shape[1]).T
    w = w / np.sqrt(np.mean(flat * flat, axis=-1, keepdims=True) + np.float32(attrs["norm_eps"]))
    w = w * scale[np.minimum(np.arange(w.shape[1]) // count, 2)] + base
    sigmoids = 1 / (1 + np.exp(-w[:, : 2 * count]))
    out = np.einsum("ti,tid->td", sigmoids[:, :count] + eps, streams)
    if attrs["last"]:
        return [out]
    terms = np.exp(w[:, 2 * count :]).reshape(-1, count, count)
    comb = terms / terms.sum(axis=-1, keepdims=True) + eps
    for step in range(attrs["iterations"]):
        if step:
            comb = comb / (comb.sum(axis=2, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
    return [out, flat, np.concatenate([2 * sigmoids[:, count:], comb.reshape(len(y), -1)], axis=1)]

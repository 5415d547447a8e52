"""The definitions in numpy of the ops in `ckdist/program/ops/cross_attention_ops.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("store_cross")
def store_cross(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Stores keys and values, (tokens, kv_heads, width) each."""
    k, v = (x.reshape(len(x), -1, of.dims[-1].width) for x, of in zip(inputs, attrs["inputs"], strict=True))
    context.cache[attrs["layer"]] = k, v
    return []


@reference("attend_cross")
def attend_cross(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """softmax(scale * q @ k.T) @ v over all cached positions. Vaswani et al. 2017, arXiv:1706.03762."""
    k, v = context.cache[attrs["layer"]]  # (positions, kv_heads, width)
    heads, keys = attrs["inputs"][0].dims[-1], attrs["keys"]
    q = inputs[0].reshape(len(inputs[0]), -1, heads.width)  # (tokens, heads, width)
    group, first = heads.count // keys.count, context.share(keys)[0]
    out = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
    for h, head in enumerate(range(*context.share(heads))):
        scores = q[:, h] @ k[:, head // group - first].T * np.float32(attrs["scale"])
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = (p / p.sum(axis=-1, keepdims=True)) @ v[:, head // group - first]
    return [out.reshape(len(out), -1)]

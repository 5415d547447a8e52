"""The definitions in numpy of the ops in `ckdist/program/ops/index.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("select_positions")
def select_positions(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The positions with the largest scores, int32 (tokens, index_top_k), ascending; -1 after the last one.

    score = sum over heads of weight * max(q . k, 0), over the layer's index keys, which the call extends. Equal scores
    are taken by ascending position.

    q: (tokens, heads * width), k: (tokens, width), weights of heads: (tokens, heads).
    """
    q, k, w = inputs
    first, top_k = len(context.index.get(attrs["layer"], ())), attrs["index_top_k"]
    keys = np.concatenate([context.index[attrs["layer"]], k]) if first else k  # (positions, width)
    context.index[attrs["layer"]] = keys
    dots = np.einsum("thw,pw->thp", q.reshape(len(q), -1, k.shape[1]), keys)
    scores = np.einsum("thp,th->tp", np.maximum(dots, 0), w)
    out = np.full((len(q), top_k), -1, np.int32)
    for t, row in enumerate(scores):
        best = np.sort(np.argsort(-row[: first + t + 1], kind="stable")[:top_k])
        out[t, : len(best)] = best
    return [out]

"""The definitions in numpy of the ops in `ckdist/program/ops/embedding.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("embed")
def embed(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Rows of the table. Ids in another rank's shard get zeros. With `eps`: row / sqrt(mean(row^2) + eps)."""
    (ids,), (table,) = inputs, weights
    begin, end = context.share(attrs["weights"][0].dims[0])
    mine = (ids >= begin) & (ids < end)
    rows = np.zeros((len(ids), table.shape[1]), table.dtype)  # (tokens, hidden)
    rows[mine] = table[ids[mine] - begin]
    if eps := attrs.get("eps", 0.0):
        rows = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + np.float32(eps))
    return [rows]

"""The definitions in numpy of the ops in `ckdist/program/ops/embedding_grad.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("embed_grad")
def embed_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Adds the row of each token to the row of its id, in token order, for ids in the rank's shard."""
    ids, dy = inputs
    begin, end = context.share(attrs["vocab"])
    mine = (ids >= begin) & (ids < end)
    table = np.zeros((end - begin, dy.shape[1]), dy.dtype)  # (vocab, hidden)
    np.add.at(table, ids[mine] - begin, dy[mine])
    return [table]

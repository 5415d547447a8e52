"""The definitions in numpy of the ops in `ckdist/program/ops/linear_heads.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("linear_heads")
def linear_heads(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head: [w_head @ x[:columns], x[columns:]].

    x: (tokens, heads * width), w: (heads * rows, columns) -> (tokens, heads * (rows + width - columns)).
    """
    width, (rows, columns) = attrs["inputs"][0].dims[-1].width, attrs["weights"][0].dims
    x = inputs[0].reshape(len(inputs[0]), -1, width)
    w = weights[0].reshape(-1, rows.width, columns.elements)
    y = np.einsum("thc,hrc->thr", x[..., : columns.elements], w)  # (tokens, heads, rows)
    return [np.concatenate([y, x[..., columns.elements :]], axis=-1).reshape(len(x), -1)]

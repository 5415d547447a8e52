"""The definitions in numpy of the ops in `ckdist/program/ops/position_embedding.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference, total


@reference("embed_positions")
def embed_positions(
    context: RankContext, inputs: Arrays, weights: list[np.ndarray | None], attrs: Attrs
) -> list[np.ndarray]:
    """positions[position + first] + types[t], with t = 1 for tokens of a second text, else 0. One table may be None."""
    ids, (table, types), begin = inputs[0], weights, context.first_token
    positions = context.positions[begin : begin + len(ids)]
    second = np.zeros(len(ids), int) if context.first_text is None else (positions >= context.first_text).astype(int)
    rows = [] if table is None else [table[positions + attrs["first"]]]
    return [total([*rows, *([] if types is None else [types[np.minimum(second, len(types) - 1)]])])]


@reference("embed_waves")
def embed_waves(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """[sin(angles), cos(angles)] of each token. Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    In the paper, sines and cosines alternate.
    """
    cos, sin = context.rope_tables(context.rope(attrs["table"]))
    begin = context.first_token
    return [np.concatenate([sin, cos], axis=-1)[begin : begin + len(inputs[0])]]

"""The definitions in numpy of the ops in `ckdist/program/ops/stage_transfer.py`."""

import numpy as np

from ckdist.layout import even_ranges
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("recv")
def recv(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The received rows of this rank, zeros in other rows, and the tally. `context.received` has all rows."""
    received, *tally = context.received[attrs["stage"]]
    rows = np.zeros_like(received)
    begin, end = (0, len(rows)) if attrs["axis"] is None else _own_rows(context, attrs["axis"], len(rows))
    rows[begin:end] = received[begin:end]
    return [rows, *tally]


def _own_rows(context: RankContext, axis: str, count: int) -> tuple[int, int]:
    """The rows [begin, end) that this rank's peer in the other stage sends."""
    return even_ranges(count, context.mesh.size(axis))[context.mesh.index(axis)]


@reference("send")
def send(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The values that the next stage receives."""
    return inputs

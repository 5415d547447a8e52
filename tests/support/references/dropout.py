"""The definitions in numpy of the ops in `ckdist/program/ops/dropout.py`."""

import numpy as np

from ckdist.program.ops.dropout import threshold
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference

COLUMN = 0x9E3779B9


@reference("dropout")
def dropout(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x / (1 - probability) where an element is kept, else 0; x if there are no keys."""
    x, keys = inputs
    return [dropped(x, keys, attrs, attrs["columns"].span(context.mesh)[0])]


def dropped(x: np.ndarray, keys: np.ndarray | None, attrs: Attrs, first: int) -> np.ndarray:
    """`dropout` of columns that begin with number `first`. The attributes are those of the op."""
    if keys is None:
        return x
    kept = is_kept(keys, attrs["stream"], first + np.arange(x.shape[1]), attrs["probability"])
    return np.where(kept, x * np.float32(1 / (1 - attrs["probability"])), np.float32(0))


def is_kept(keys: np.ndarray, stream: int, columns: np.ndarray, probability: float) -> np.ndarray:
    """Bool (tokens, columns): True for the elements that are kept. `keys`: uint32 (tokens,)."""
    rows = _mixed(keys.astype(np.uint32) ^ np.uint32(stream))
    return _mixed(rows[:, None] + columns.astype(np.uint32) * np.uint32(COLUMN)) >= np.uint32(threshold(probability))


def _mixed(x: np.ndarray) -> np.ndarray:
    """A hash of 32 bits to 32 bits."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))

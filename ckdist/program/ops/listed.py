"""Positions and blocks of positions that are listed for the tokens of an attention."""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.op_types import Arrays, Attrs, Values
from ckdist.program.program import Value


def check_listed(name: str, listed: Values, q: Value, attrs: Attrs, k: Value | None = None) -> None:
    """Raises LayoutError if positions are listed for other tokens or heads, or if the attention is not causal."""
    for positions in listed:
        if positions.dims[0] != q.dims[0] or positions.dtype != "i32":
            raise LayoutError(f"{name}: %{positions.name} has no positions for the tokens of %{q.name}")
        if (
            k is not None
            and "listed_block" in attrs
            and replace(positions.dims[-1], width=k.dims[-1].width) != k.dims[-1]
        ):
            raise LayoutError(f"{name}: %{positions.name} has no blocks for the heads of %{k.name}")
        if attrs.get("window") or attrs.get("bidirectional") or attrs.get("buckets"):
            raise LayoutError(f"{name}: windows, biases and attention in both directions allow no listed positions")


def is_listed(listed: Arrays, positions: int) -> np.ndarray:
    """Bool (tokens, positions): True if a token sees a position. `listed` is empty, or has the positions of tokens, -1
    for none.
    """
    if not listed:
        return np.ones((1, positions), bool)
    seen = np.zeros((len(listed[0]), positions + 1), bool)
    np.put_along_axis(seen, listed[0], True, axis=1)  # column -1 is for none
    return seen[:, :-1]


def seen_by(listed: np.ndarray, positions: int, kv_heads: int, block: int) -> np.ndarray:
    """Bool (kv_heads, tokens, positions): True if a token sees a position. Blocks of `block` positions are listed."""
    if not block:
        return np.stack([is_listed([listed], positions)] * kv_heads)
    blocks = [is_listed([own], -(-positions // block)) for own in np.split(listed, kv_heads, axis=1)]
    return np.stack(blocks).repeat(block, axis=2)[..., :positions]

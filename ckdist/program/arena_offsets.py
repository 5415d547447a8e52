"""Arena offsets by lifetime: values with overlapping lifetimes get disjoint bytes, others may share bytes."""

from collections.abc import Callable, Iterable

import numpy as np


def first_fit(uses: Iterable[tuple[int, int]], size: Callable[[int], int]) -> tuple[dict[int, int], int]:
    """Places the largest value first, each at the lowest offset that is free during its lifetime.

    Args:
        uses: (time, value) pairs, times ascending. A value lives from its first use to its last, both included.
        size: Bytes of a value.

    Returns:
        The offset of each value, and the bytes of the arena.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for time, value in uses:
        first.setdefault(value, time)
        last[value] = time
    sizes = {value: size(value) for value in first}
    order = sorted(first, key=lambda v: -sizes[v])
    firsts, lasts = (np.array([times[v] for v in order], np.int64) for times in (first, last))  # (values,)
    begins, ends = np.zeros((2, len(order)), np.int64)  # byte ranges of the values that are already placed
    for at, value in enumerate(order):
        overlapping = np.flatnonzero((firsts[:at] <= last[value]) & (lasts[:at] >= first[value]))
        offset, bytes_ = 0, sizes[value]
        for begin, end in sorted(zip(begins[overlapping].tolist(), ends[overlapping].tolist(), strict=True)):
            if offset + bytes_ > begin:
                offset = max(offset, end)
        begins[at], ends[at] = offset, offset + bytes_
    return dict(zip(order, begins.tolist(), strict=True)), int(ends.max(initial=0))

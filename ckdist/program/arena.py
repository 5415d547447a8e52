"""Places in an arena for values that live for a while: values whose lives overlap lie apart, others may share their
bytes.
"""

from collections.abc import Callable, Iterable

import numpy as np


def first_fit(uses: Iterable[tuple[int, int]], size: Callable[[int], int]) -> tuple[dict[int, int], int]:
    """The offset of every value, and the bytes of the arena: the largest first, each at the lowest place that is free
    while it lives.

    `uses`: (time, value), times ascending; a value lives from its first use to its last, both included. `size`: bytes
    of a value.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for time, value in uses:
        first.setdefault(value, time)
        last[value] = time
    sizes = {value: size(value) for value in first}
    order = sorted(first, key=lambda v: -sizes[v])
    firsts, lasts = (np.array([times[v] for v in order], np.int64) for times in (first, last))  # (values,)
    begins, ends = np.zeros((2, len(order)), np.int64)  # of those before the one that is placed
    for at, value in enumerate(order):
        beside = np.flatnonzero((firsts[:at] <= last[value]) & (lasts[:at] >= first[value]))
        offset, bytes_ = 0, sizes[value]
        for begin, end in sorted(zip(begins[beside].tolist(), ends[beside].tolist(), strict=True)):
            if offset + bytes_ > begin:
                offset = max(offset, end)
        begins[at], ends[at] = offset, offset + bytes_
    return dict(zip(order, begins.tolist(), strict=True)), int(ends.max(initial=0))

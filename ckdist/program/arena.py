"""Places in an arena for values that live for a while: values whose lives overlap lie apart, others may share their
bytes.
"""

from collections.abc import Callable, Iterable


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
    placed: list[tuple[int, int, int]] = []  # (offset, end, value)
    for value in sorted(first, key=lambda v: -size(v)):
        offset = 0
        for begin, end, other in sorted(placed):
            if first[value] <= last[other] and first[other] <= last[value] and offset + size(value) > begin:
                offset = max(offset, end)
        placed.append((offset, offset + size(value), value))
    return {value: offset for offset, _, value in placed}, max((end for _, end, _ in placed), default=0)

"""Finds earlier places of the last tokens of a text."""

import numpy as np

SIZES = 8, 3  # tokens of an n-gram, the longest first
MAX_BITS = 19  # of a table: 2 MiB
FEW = 32  # tokens that are added one by one faster than together
MASK = (1 << 64) - 1
FACTORS = tuple((0x9E3779B97F4A7C15 * (2 * i + 1)) & MASK | 1 for i in range(max(SIZES)))


class NgramIndex:
    """The last place of each n-gram of a growing text, for n in SIZES.

    A table has one place per hash. So memory and time per token are fixed, and some older places are lost.

    Args:
        tokens: int32 (capacity,). The caller fills it.
    """

    def __init__(self, tokens: np.ndarray) -> None:
        bits = min(MAX_BITS, max(8, (4 * len(tokens)).bit_length()))
        self.tokens, self._shift = tokens, 64 - bits
        # Tokens before the end of the n-gram; 0: none. int32 (2^bits,) for each size.
        self._ends = [np.zeros(1 << bits, np.int32) for _ in SIZES]
        self.length = 0  # tokens that were added

    def extend(self, length: int) -> None:
        """Adds the tokens up to `length`."""
        begin, self.length = self.length, length
        if length - begin <= FEW:
            for end in range(begin + 1, length + 1):
                for size, ends in zip(SIZES, self._ends, strict=True):
                    if end >= size:
                        ends[self._hash(self.tokens[end - size : end].tolist())] = end
            return
        for size, ends in zip(SIZES, self._ends, strict=True):
            first = max(begin + 1, size)  # the first end of an n-gram
            count = length - first + 1
            if count > 0:
                sums = np.zeros(count, np.uint64)
                for i in range(size):
                    begin_of = first - size + i
                    sums += self.tokens[begin_of : begin_of + count].astype(np.uint64) * np.uint64(FACTORS[i])
                ends[(sums >> np.uint64(self._shift)).astype(np.int64)] = np.arange(first, length + 1, dtype=np.int32)

    def find(self, last: list[int]) -> tuple[int, int]:
        """Returns the place after the last occurrence of the end of `last`, and its tokens in common. (0, 0): none."""
        for size, ends in zip(SIZES, self._ends, strict=True):
            if len(last) >= size:
                end = int(ends[self._hash(last[-size:])])
                if end and self.tokens[end - size : end].tolist() == last[-size:]:
                    return end, size
        return 0, 0

    def _hash(self, tokens: list[int]) -> int:
        return (sum(map(int.__mul__, tokens, FACTORS)) & MASK) >> self._shift

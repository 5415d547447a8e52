"""Finds earlier places of the last tokens of a text."""

import numpy as np

SIZES = 8, 3  # tokens of an n-gram, the longest first
MAX_BITS = 19  # of a table: 2 MiB
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
        self._tables = [np.zeros(1 << bits, np.int32) for _ in SIZES]
        self._ends = [table.data for table in self._tables]  # one number is read faster
        self.length = 0  # tokens that were added

    def extend(self, length: int) -> None:
        """Adds the tokens up to `length`, all together."""
        begin, self.length = self.length, length
        for size, table in zip(SIZES, self._tables, strict=True):
            first = max(begin + 1, size)  # the first end of an n-gram
            count = length - first + 1
            if count > 0:
                sums = np.zeros(count, np.uint64)
                for i in range(size):
                    place = first - size + i
                    sums += self.tokens[place : place + count].astype(np.uint64) * np.uint64(FACTORS[i])
                table[(sums >> np.uint64(self._shift)).astype(np.int64)] = np.arange(first, length + 1, dtype=np.int32)

    def add(self, last: list[int]) -> tuple[int, int]:
        """Adds one token. Returns the same as `find` before it was added.

        Args:
            last: The text's last tokens up to this one, as many as the longest n-gram.
        """
        self.length = length = self.length + 1
        found = 0, 0
        for size, ends in zip(SIZES, self._ends, strict=True):
            if length >= size:
                own = last[-size:]
                place = self._hash(own)
                end = ends[place]
                ends[place] = length
                if end and not found[0] and self.tokens[end - size : end].tolist() == own:
                    found = end, size
        return found

    def find(self, last: list[int]) -> tuple[int, int]:
        """Returns the place after the last occurrence of the end of `last`, and its tokens in common. (0, 0): none."""
        for size, ends in zip(SIZES, self._ends, strict=True):
            if len(last) >= size:
                own = last[-size:]
                end = ends[self._hash(own)]
                if end and self.tokens[end - size : end].tolist() == own:
                    return end, size
        return 0, 0

    def _hash(self, tokens: list[int]) -> int:
        return (sum(map(int.__mul__, tokens, FACTORS)) & MASK) >> self._shift

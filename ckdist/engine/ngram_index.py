"""Finds earlier places of the last tokens of a text."""

from collections.abc import Iterable

import numpy as np

SIZES = 8, 3  # tokens of an n-gram, the longest first
MAX_BITS = 19  # of a table: 2 MiB
MASK = (1 << 64) - 1
# The hash of an n-gram is the sum of token * FACTORS[i], i tokens before its last one, modulo 2^64.
FACTORS = tuple(pow(0x9E3779B97F4A7C15, i + 1, MASK + 1) for i in range(max(SIZES) + 1))


class Tail:
    """The last tokens of a text, and their hashes.

    Attributes:
        tokens: As many as the longest n-gram.
        hashes: One for each of SIZES.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = [0] * max(SIZES)
        self.hashes = [0] * len(SIZES)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Adds the next token."""
        tokens = self.tokens
        self.hashes = [
            ((known + token) * FACTORS[0] - tokens[-size] * FACTORS[size]) & MASK
            for size, known in zip(SIZES, self.hashes, strict=True)
        ]
        tokens.append(token)
        del tokens[0]


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
                    place = first - 1 - i
                    sums += self.tokens[place : place + count].astype(np.uint64) * np.uint64(FACTORS[i])
                table[(sums >> np.uint64(self._shift)).astype(np.int64)] = np.arange(first, length + 1, dtype=np.int32)

    def add(self, tail: Tail) -> tuple[int, int]:
        """Adds the last token of `tail`. Returns the same as `find` before it was added."""
        self.length += 1
        return self._find(tail, self.length)

    def find(self, tail: Tail) -> tuple[int, int]:
        """Returns the place after the last occurrence of the end of `tail`, and its tokens in common. (0, 0): none."""
        return self._find(tail, 0)

    def _find(self, tail: Tail, length: int) -> tuple[int, int]:
        """As `find`. Enters `length` as the place of the n-grams, unless it is 0."""
        found = 0, 0
        for size, ends, known in zip(SIZES, self._ends, tail.hashes, strict=True):
            place = known >> self._shift
            end = ends[place]
            if length >= size:
                ends[place] = length
            if end and not found[0] and self.tokens[end - size : end].tolist() == tail.tokens[-size:]:
                found = end, size
                if not length:
                    break
        return found

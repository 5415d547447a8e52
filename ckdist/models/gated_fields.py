"""Residual streams that gates of low rank read, and embeddings of n-grams (Qwen4)."""

import functools
import math
from dataclasses import dataclass

from ckdist.layout import Dim

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Ngrams:
    """Embeddings of the last tokens, which a layer adds to all streams. Rows of a table are chosen by hashes.

    Hash h is of the last 2 + h // each tokens: see `ngram_rows`.

    Attributes:
        layer: The layer before which they are added.
        width: Elements of a row.
        rows: Rows of the table, or of each of its parts.
        parts: Tensors that have the table; 0: it is one matrix.
        each: Hashes for each number of tokens.
        end: A token that ends the context.
        taps: Tokens that the convolution sees. Neighbouring ones are `dilation` apart.
    """

    layer: int
    width: int
    rows: int
    parts: int
    each: int
    end: int
    taps: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]  # of the hashes
    offsets: tuple[int, ...]

    @property
    def dilation(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)

    @property
    def table(self) -> tuple[Dim, ...]:
        """The dimensions of the table."""
        rows = Dim("ngram_rows", self.rows), Dim("ngram", self.width)
        return (Dim("ngram_parts", self.parts), *rows) if self.parts else rows


@dataclass(frozen=True)
class GatedStreams:
    """Each part of a layer reads the mean of the normed streams, times a gate for each element.

    Two matrices of low rank make the gates. A coefficient for each stream multiplies the result of the part that is
    added to it.
    """

    count: int
    rank: int
    ngrams: Ngrams | None = None
    normed = True  # the last layer's output


def multipliers(vocab: int, tokens: int, seed: int) -> tuple[int, ...]:
    """The odd factors of hashes: splitmix64 of consecutive states (Steele et al. 2014, doi:10.1145/2660193.2660195)."""
    most, found = max(1, ((1 << 63) - 1) // vocab // 2), []
    for number in range(1, tokens + 1):
        z = (seed + 0x9E3779B97F4A7C15 * (number + 1)) & MASK
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        found.append(2 * ((z ^ z >> 31) % most) + 1)
    return tuple(found)


@functools.cache
def primes_from(least: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are not less than `least`."""
    found: list[int] = []
    number = max(least, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)

"""The merges of a SentencePiece vocabulary, whose file has scores in place of them."""

from collections.abc import Iterator, Mapping

import numpy as np

_LONGEST_LEFT = 64  # characters
_TOKENS = 1 << 14  # tokens that are halved at a time
_BITS = 24  # of a hash that are compared
_FACTOR = 0x9E3779B97F4A7C15  # odd, so it has an inverse


def scored_merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the merges that are equivalent to the scores.

    SentencePiece joins the neighbours whose joint token has the best score, and the leftmost ones among equals. The
    merges are all ways to halve a token, in the order of the tokens' scores. Tokens of one score are runs of spaces and
    the like (Mistral's). There the leftmost is joined repeatedly, so longer left halves come first.
    """
    tokens = sorted(scores, key=scores.__getitem__, reverse=True)
    halves, merges, owners = _halves(tokens), list[tuple[str, str]](), list[int]()
    for owner, cut in halves:
        left, right = tokens[owner][:cut], tokens[owner][cut:]
        if left in scores and right in scores:  # not only by their hashes
            merges.append((left, right))
            owners.append(owner)
    ordered = np.array([scores[token] for token in tokens])
    changes = np.flatnonzero(np.diff(ordered, prepend=np.nan, append=np.nan))  # where another score begins
    tied = np.flatnonzero(np.diff(changes) > 1)
    bounds = np.searchsorted(owners, np.stack((changes[tied], changes[tied + 1]), axis=1))
    for begin, end in bounds.tolist():
        merges[begin:end] = sorted(merges[begin:end], key=lambda merge: (-len(merge[0]), ids[merge[0]], ids[merge[1]]))
    return merges


def _halves(tokens: list[str]) -> Iterator[tuple[int, int]]:
    """Yields each token's number and the length of its left half, longest first, if both halves may be tokens."""
    parts = [_Hashed(tokens[i : i + _TOKENS]) for i in range(0, len(tokens), _TOKENS)]
    known = np.zeros(1 << _BITS, np.bool_)
    for part in parts:
        known[part.hashes(part.begins, part.ends)] = True
    for number, part in enumerate(parts):
        owners, cuts = part.halves(known)
        yield from zip((owners + number * _TOKENS).tolist(), cuts.tolist(), strict=True)


class _Hashed:
    """Tokens in one array of characters, of which any part has a hash: sum of character * _FACTOR ** place."""

    def __init__(self, tokens: list[str]) -> None:
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self.ends = np.cumsum(lengths)
        self.begins = self.ends - lengths
        characters = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), np.uint32)
        count = len(characters) + 1
        factors, inverses = (np.full(count, factor, np.uint64) for factor in (_FACTOR, pow(_FACTOR, -1, 1 << 64)))
        inverses[0] = 1
        self._inverses = np.multiply.accumulate(inverses)
        self._sums = np.zeros(count, np.uint64)
        np.cumsum(np.multiply.accumulate(factors)[:-1] * (characters + np.uint64(1)), out=self._sums[1:])

    def hashes(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns the first bits of the hashes of some parts."""
        return ((self._sums[ends] - self._sums[begins]) * self._inverses[begins]) >> np.uint64(64 - _BITS)

    def halves(self, known: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens' numbers, and the lengths of left halves, if the hashes of both halves are known."""
        cuts = np.minimum(self.ends - self.begins - 1, _LONGEST_LEFT).clip(0)
        owners = np.repeat(np.arange(len(cuts)), cuts)
        lefts = np.repeat(np.cumsum(cuts), cuts) - np.arange(len(owners))
        begins, ends = self.begins[owners], self.ends[owners]
        found = known[self.hashes(begins, begins + lefts)]
        found[found] = known[self.hashes(begins[found] + lefts[found], ends[found])]
        return owners[found], lefts[found]

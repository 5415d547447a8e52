"""Guesses the next tokens of one sequence from earlier text: its own, and its tenant's earlier answers."""

import numpy as np

from ckdist.engine.acceptance import Acceptance
from ckdist.engine.ngram_index import SIZES, NgramIndex
from ckdist.engine.sequence import Sequence

# Tokens that agree before the draft, by the classes of `Acceptance`.
CLASSES = 4, 8, 16, 32
PRIORS = (0.4,) * (len(CLASSES) + 1)
# (share of right tokens, tokens): a drafter below this share is asked every so many tokens.
RESTS = (0.2, 16), (0.4, 8)
SINGLE = 8  # more new tokens than that are added to the index together


def class_of(agreed: int) -> int:
    """The place of a number of tokens among CLASSES."""
    return sum(agreed >= limit for limit in CLASSES)


class Drafter:
    """Follows a sequence, and an earlier text that goes on as the sequence does.

    Whether its guesses are right is seen from each new token, drafted or not. So a useless drafter costs no step.

    Args:
        acceptance: The parts of right tokens, over all sequences.
        archive: The tenant's earlier answers, or None.
    """

    def __init__(self, sequence: Sequence, acceptance: Acceptance, archive: NgramIndex | None) -> None:
        self._sequence, self._archive = sequence, archive
        self._index = NgramIndex(sequence.tokens)
        self._last: list[int] = []  # tokens of the sequence, as many as the longest n-gram
        self.acceptance = acceptance.of_sequence()
        self._source: np.ndarray | None = None  # the text that is followed
        self._place = self._end = 0  # of its next token, and of the text
        self._agreed = 0  # tokens before that which agree
        self._rest = 0  # new tokens before it is asked again

    def follow(self) -> bool:
        """Takes note of the sequence's new tokens and looks for a text to follow if there is none.

        Returns False if it waits for more tokens, so that it has no guess.
        """
        sequence, index, last = self._sequence, self._index, self._last
        begin, length = index.length, sequence.length
        if length - begin < self._rest:
            return False
        if not begin or length - begin > SINGLE:
            for token in sequence.tokens[begin : length - 1].tolist() if self._source is not None else ():
                self._see(token)
            begin = max(0, length - 1)
            index.extend(begin)
            last[:] = sequence.tokens[max(0, begin - max(SIZES)) : begin].tolist()
        found = 0, 0
        for token in sequence.tokens[begin:length].tolist():
            last.append(token)
            del last[: -max(SIZES)]
            found = index.add(last)
            self._see(token)
        if self._source is None and begin < length:
            self._search(last, *found)
        part = self.acceptance.part(class_of(self._agreed if self._source is not None else SIZES[-1]))
        self._rest = next((tokens for below, tokens in RESTS if part < below), 0)
        return True

    def _see(self, token: int) -> None:
        if self._source is None:
            return
        right = self._place < self._end and int(self._source[self._place]) == token
        self.acceptance.count(class_of(self._agreed), right)
        self._place, self._agreed = self._place + 1, self._agreed + 1
        if self._source is self._sequence.tokens:
            self._end = self._sequence.length
        if not right or self._place >= self._end:
            self._source = None

    def _search(self, last: list[int], place: int, agreed: int) -> None:
        source, end = self._index.tokens, self._sequence.length
        if self._archive is not None:
            other, common = self._archive.find(last)
            if common > agreed and other < self._archive.length:
                place, agreed, source, end = other, common, self._archive.tokens, self._archive.length
        if agreed:
            self._source, self._place, self._end, self._agreed = source, place, end, agreed

    def guess(self, most: int) -> tuple[list[int], list[float]]:
        """Returns at most `most` next tokens, and for each the probability that it and all before it are right."""
        if self._source is None:
            return [], []
        tokens = self._source[self._place : min(self._end, self._place + most)].tolist()
        if self._source is self._sequence.tokens and tokens:  # a text that repeats itself goes on beyond its end
            while len(tokens) < most:
                tokens += tokens[: most - len(tokens)]
        parts, product = list[float](), 1.0
        for i in range(len(tokens)):
            product *= self.acceptance.part(class_of(self._agreed + i))
            parts.append(product)
        return tokens, parts

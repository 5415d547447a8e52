"""Guesses the next tokens of one sequence from earlier text: its own, and its tenant's earlier answers."""

import numpy as np

from ckdist.engine.ngram_index import SIZES, NgramIndex
from ckdist.engine.sequence import Sequence

# Tokens that agree before the draft, by the classes of `Acceptance`.
CLASSES = 4, 8, 16, 32
PRIOR = 0.5, 2.0  # part that is right, and its weight in tokens
OWN_WEIGHT = 8.0  # of the engine's estimate against the tokens of one sequence
REST_TOKENS, REST_BELOW = 4, 0.4  # a drafter that guesses so little looks at so many tokens together, which is faster
FADES = 0.95  # weight of all earlier tokens against the last one


class Acceptance:
    """How many drafted tokens are right, by the number of tokens that agree before them. Earlier tokens fade."""

    def __init__(self, parent: "Acceptance | None" = None) -> None:
        self._parent = parent
        self._right = [0.0] * (len(CLASSES) + 1)
        self._all = [0.0] * (len(CLASSES) + 1)

    def count(self, agreed: int, right: bool) -> None:
        """Takes note of a token that was guessed after `agreed` tokens."""
        place = class_of(agreed)
        self._right[place] = FADES * self._right[place] + right
        self._all[place] = FADES * self._all[place] + 1
        if self._parent is not None:
            self._parent.count(agreed, right)

    def part(self, agreed: int) -> float:
        """The part of the tokens after `agreed` ones that are right."""
        place = class_of(agreed)
        prior, weight = PRIOR if self._parent is None else (self._parent.part(agreed), OWN_WEIGHT)
        return (self._right[place] + prior * weight) / (self._all[place] + weight)


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
        self.acceptance = Acceptance(acceptance)
        self._source: np.ndarray | None = None  # the text that is followed
        self._place = self._end = 0  # of its next token, and of the text
        self._agreed = 0  # tokens before that which agree

    def follow(self) -> bool:
        """Takes note of the sequence's new tokens and looks for a text to follow if there is none.

        Returns False if it waits for more tokens, so that it has no guess.
        """
        sequence, index, last = self._sequence, self._index, self._last
        begin, length = index.length, sequence.length
        if begin and length - begin < REST_TOKENS and self.acceptance.part(SIZES[-1]) < REST_BELOW:
            return False
        if not begin:
            begin = max(0, length - 1)
            index.extend(begin)
            last += sequence.tokens[max(0, begin - max(SIZES)) : begin].tolist()
        found = 0, 0
        for token in sequence.tokens[begin:length].tolist():
            last.append(token)
            del last[: -max(SIZES)]
            found = index.add(last)
            self._see(token)
        if self._source is None and begin < length:
            self._search(last, *found)
        return True

    def _see(self, token: int) -> None:
        if self._source is None:
            return
        right = self._place < self._end and int(self._source[self._place]) == token
        self.acceptance.count(self._agreed, right)
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
            product *= self.acceptance.part(self._agreed + i)
            parts.append(product)
        return tokens, parts

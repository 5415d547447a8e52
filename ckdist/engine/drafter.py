"""Guesses the next tokens of one sequence from earlier text: its own, and its tenant's earlier answers."""

from math import inf

import numpy as np

from ckdist.engine.acceptance import Acceptance
from ckdist.engine.ngram_index import SIZES, NgramIndex, Tail
from ckdist.engine.sequence import Sequence

# Tokens that agree before the draft, by the classes of `Acceptance`.
CLASSES = 4, 8, 16, 32
PRIORS = (0.4,) * (len(CLASSES) + 1)
# (share of right tokens, tokens): a drafter below this share is asked every so many tokens.
RESTS = (0.1, 64), (0.25, 32), (0.4, 8)
LEAST_PART = 0.05  # a token is not guessed if it and all before it are right with a smaller probability
SINGLE = 24  # more new tokens than that are added to the index together


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
        self._tail = Tail()
        self.acceptance = acceptance.of_sequence()
        self._source: np.ndarray | None = None  # the text that is followed
        self._place = self._end = 0  # of its next token, and of the text
        self._agreed = 0  # tokens before that which agree
        self._rest = 0  # new tokens before it is asked again

    def follow(self) -> bool:
        """Takes note of the sequence's new tokens and looks for a text to follow if there is none.

        Returns False if it waits for more tokens, so that it has no guess.
        """
        sequence, index, tail = self._sequence, self._index, self._tail
        begin, length = index.length, sequence.length
        if length - begin < self._rest:
            return False
        if not begin or length - begin > SINGLE:
            for token in sequence.tokens[begin : length - 1].tolist() if self._source is not None else ():
                self._see(token)
            begin = max(0, length - 1)
            index.extend(begin)
            self._set_rest()
            tail = self._tail = Tail(sequence.tokens[max(0, begin - max(SIZES)) : begin].tolist())
        found = 0, 0
        for token in sequence.tokens[begin:length].tolist():
            tail.add(token)
            found = index.add(tail)
            if self._source is not None:
                self._see(token)
        if self._source is None and begin < length:
            self._search(*found)
        return True

    @property
    def waits(self) -> int:
        """Further tokens of the sequence before `follow` looks at them."""
        return self._rest - (self._sequence.length - self._index.length)

    def _set_rest(self) -> None:
        part = self.acceptance.part(class_of(self._agreed if self._source is not None else SIZES[-1]))
        self._rest = next((tokens for below, tokens in RESTS if part < below), 0)

    def _see(self, token: int) -> None:
        """Compares the next token of the text that is followed."""
        if self._source is None:
            return
        right = self._place < self._end and int(self._source[self._place]) == token
        self.acceptance.count(class_of(self._agreed), right)
        self._place, self._agreed = self._place + 1, self._agreed + 1
        if self._source is self._sequence.tokens:
            self._end = self._sequence.length
        if not right or self._place >= self._end:
            self._source = None
        self._set_rest()

    def _search(self, place: int, agreed: int) -> None:
        source, end = self._index.tokens, self._sequence.length
        if self._archive is not None:
            other, common = self._archive.find(self._tail)
            if common > agreed and other < self._archive.length:
                place, agreed, source, end = other, common, self._archive.tokens, self._archive.length
        if agreed:
            self._source, self._place, self._end, self._agreed = source, place, end, agreed
            self._set_rest()

    def guess(self, most: int) -> tuple[list[int], list[float]]:
        """Returns at most `most` next tokens, and for each the probability that it and all before it are right."""
        if self._source is None:
            return [], []
        tokens = self._source[self._place : min(self._end, self._place + most)].tolist()
        if self._source is self._sequence.tokens and tokens:  # a text that repeats itself goes on beyond its end
            while len(tokens) < most:
                tokens += tokens[: most - len(tokens)]
        parts, product, part, agreed, limit = list[float](), 1.0, 0.0, self._agreed, 0
        for i in range(agreed, agreed + len(tokens)):
            if i >= limit:
                place = class_of(i)
                limit, part = (*CLASSES, inf)[place], self.acceptance.part(place)
            product *= part
            if product < LEAST_PART:
                break
            parts.append(product)
        return tokens[: len(parts)], parts

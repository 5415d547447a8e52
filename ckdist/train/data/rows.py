"""A token cache as rows of one length, in an order that depends on seed and epoch alone.

Texts are laid end to end and cut at every row's end, so nothing is padded but the last row. Chats are kept whole, since
half of one teaches answers without their questions: each goes to the first open row with room, and what is longer than
a row is cut off. Among chats a text is cut into pieces of a row's length, which are laid as they are. Rows are then
shuffled, so that a batch is not of one text. A row is a pure function of (seed, epoch, row), so a place in the data is
two numbers.
"""

from functools import lru_cache
from typing import TypeAlias

import numpy as np

from ckdist.train.data.cache import TokenCache

OPEN_ROWS = 64  # that a chat or a piece of a text is tried in
Pieces: TypeAlias = list[tuple[int, int, int]]  # begin, end of tokens in the cache, and where the document ends


class Rows:
    """The rows of some of a cache's documents. `shuffle` off: in their own order, for validation."""

    def __init__(self, cache: TokenCache, documents: np.ndarray, length: int, seed: int, shuffle: bool = True) -> None:
        """`documents`: which, (documents,); `length`: tokens of a row."""
        self.cache, self.documents, self.length, self.seed, self.shuffle = cache, documents, length, seed, shuffle
        self.whole = cache.learned is not None
        self._whole_rows = lru_cache(maxsize=2)(lambda epoch: self._pack(self._order(epoch)))
        self._ends = lru_cache(maxsize=2)(self._lay_out)
        self._places = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch, 1)).permutation(self.count(epoch))
        )

    def count(self, epoch: int) -> int:
        """Rows of an epoch."""
        return len(self._whole_rows(epoch)) if self.whole else -(-int(self._ends(epoch)[1][-1]) // self.length)

    def row(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Ids and targets, int32, at most (length,), and where the row's sequences begin."""
        ids, targets, starts, at = [], [], [], 0
        for begin, end, last in self._pieces(epoch, index):
            tokens = np.asarray(self.cache.tokens[begin : min(end + 1, last)], np.int32)
            following = np.full(end - begin, -1, np.int32)
            following[: len(tokens) - 1] = tokens[1:]
            if self.cache.learned is not None:
                flags = self.cache.learned[begin + 1 : begin + len(tokens)]
                following[: len(flags)][flags == 0] = -1
            ids.append(tokens[: end - begin])
            targets.append(following)
            starts.append(at)
            at += end - begin
        return np.concatenate(ids), np.concatenate(targets), starts

    def _pieces(self, epoch: int, index: int) -> Pieces:
        """What a row is made of."""
        index = int(self._places(epoch)[index]) if self.shuffle else index
        if self.whole:
            return self._whole_rows(epoch)[index]
        order, ends = self._ends(epoch)
        begin, until, pieces = index * self.length, min((index + 1) * self.length, int(ends[-1])), []
        at = int(np.searchsorted(ends, begin, side="right"))
        while begin < until:
            document_end, stop = int(self.cache.starts[order[at] + 1]), min(until, int(ends[at]))
            shift = document_end - int(ends[at])
            pieces.append((begin + shift, stop + shift, document_end))
            begin, at = stop, at + 1
        return pieces

    def _order(self, epoch: int) -> np.ndarray:
        """The documents in an epoch's order, (documents,)."""
        order = self.documents
        if self.shuffle:
            order = order[np.random.default_rng((self.seed, epoch)).permutation(len(order))]
        return order

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents in an epoch's order, and where each ends among its tokens, both (documents,)."""
        order = self._order(epoch)
        return order, np.cumsum(self.cache.starts[order + 1] - self.cache.starts[order])

    def _pack(self, order: np.ndarray) -> list[Pieces]:
        """Pieces of each row: first fit among the rows that were opened last."""
        rows: list[Pieces] = []
        room: list[int] = []
        for document in order.tolist():
            for piece in self._cut(document):
                size = piece[1] - piece[0]
                first = max(0, len(rows) - OPEN_ROWS)
                at = next((i for i in range(first, len(rows)) if room[i] >= size), None)
                if at is None:
                    at = len(rows)
                    rows.append([])
                    room.append(self.length)
                rows[at].append(piece)
                room[at] -= size
        return rows

    def _cut(self, document: int) -> Pieces:
        """A chat's beginning, or all of a text, whose every token is learned."""
        begin, last = int(self.cache.starts[document]), int(self.cache.starts[document + 1])
        learned = self.cache.learned
        until = last if learned is None or learned[begin:last].all() else begin + 1
        return [(at, min(at + self.length, last), last) for at in range(begin, until, self.length)]


def split(cache: TokenCache, percentage: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents to train on and documents that are held out, both in their own order."""
    held = min(int(np.ceil(cache.documents * percentage / 100)), cache.documents - 1) if percentage else 0
    chosen = np.zeros(cache.documents, bool)
    chosen[np.random.default_rng((seed, 1 << 32)).permutation(cache.documents)[:held]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)

"""A token cache as rows of one length. Their order depends only on seed and epoch.

Texts are laid end to end and cut at every row's end, so only the last row is padded. Chats stay whole, because half a
chat teaches answers without their questions. Each chat goes to the first open row with room, and is truncated if it is
longer than a row. In data with chats, a text is cut into pieces of a row's length, which are placed like chats.

Rows are then shuffled, so that a batch does not come from one text. A row is a pure function of (seed, epoch, row), so
two numbers are a position in the data.
"""

from functools import lru_cache
from typing import TypeAlias

import numpy as np

from ckdist.train.batch import PackedBatch
from ckdist.train.data.token_cache import TokenCache

OPEN_ROWS = 64  # rows that first fit tries
Pieces: TypeAlias = list[tuple[int, int, int]]  # begin and end in the cache's tokens, and the document's end


def pack(rows: list[tuple[np.ndarray, np.ndarray, list[int]]], count: int, length: int) -> PackedBatch:
    """Packs `count` rows of `length` tokens. Missing tokens and rows become sequences without targets."""
    ids, targets, starts = np.zeros(count * length, np.int32), np.full(count * length, -1, np.int32), []
    for index in range(count):
        begin = index * length
        if index >= len(rows):
            starts.append(begin)
            continue
        tokens, following, own = rows[index]
        ids[begin : begin + len(tokens)], targets[begin : begin + len(tokens)] = tokens, following
        starts += [begin + start for start in own]
        if len(tokens) < length:
            starts.append(begin + len(tokens))
    return PackedBatch(ids, targets, np.array([*starts, count * length], np.int32))


class Rows:
    """The rows of some of a cache's documents.

    Args:
        documents: Indices of the documents, (documents,).
        length: Tokens of a row.
        seed: Seed of the order.
        shuffle: False: the documents' own order, for validation.
        passes: float (documents,): how often an epoch has each document; None: once. A fraction is a random part of
            the documents with the same value, another one in each epoch.
    """

    def __init__(
        self,
        cache: TokenCache,
        documents: np.ndarray,
        length: int,
        seed: int,
        shuffle: bool = True,
        passes: np.ndarray | None = None,
    ) -> None:
        self.passes = passes
        self.cache, self.documents, self.length, self.seed, self.shuffle = cache, documents, length, seed, shuffle
        self.whole = cache.learned is not None
        self._whole_rows = lru_cache(maxsize=2)(lambda epoch: self._pack(self._order(epoch)))
        self._ends = lru_cache(maxsize=2)(self._lay_out)
        self._places = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch, 1)).permutation(self.count(epoch))
        )

    def count(self, epoch: int) -> int:
        """Number of rows of an epoch."""
        return len(self._whole_rows(epoch)) if self.whole else -(-int(self._ends(epoch)[1][-1]) // self.length)

    def row(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """(ids, targets, starts of sequences) of a row: int32, at most (length,)."""
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

    def batch(self, epoch: int, indices: range, count: int) -> PackedBatch:
        """The rows `indices` of an epoch, filled up to `count` rows."""
        return pack([self.row(epoch, index) for index in indices], count, self.length)

    def _pieces(self, epoch: int, index: int) -> Pieces:
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
        order = self.documents if self.passes is None else self._repeated(epoch)
        if self.shuffle:
            order = order[np.random.default_rng((self.seed, epoch)).permutation(len(order))]
        return order

    def _repeated(self, epoch: int) -> np.ndarray:
        """The documents of an epoch by their passes, in their own order."""
        assert self.passes is not None, "only weighted documents are repeated"
        counts = self.passes.astype(np.int64)
        random = np.random.default_rng((self.seed, epoch, 2))
        for value in np.unique(self.passes):
            same = np.flatnonzero(self.passes == value)
            rest = round(float(value - np.floor(value)) * len(same))
            counts[random.permutation(same)[:rest]] += 1
        return np.repeat(self.documents, counts)

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(documents in an epoch's order, end of each among its tokens), both (documents,)."""
        order = self._order(epoch)
        return order, np.cumsum(self.cache.starts[order + 1] - self.cache.starts[order])

    def _pack(self, order: np.ndarray) -> list[Pieces]:
        """The pieces of each row, by first fit among the rows opened last."""
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
        """The start of a chat, or all pieces of a text. All tokens of a text are learned."""
        begin, last = int(self.cache.starts[document]), int(self.cache.starts[document + 1])
        learned = self.cache.learned
        until = last if learned is None or learned[begin:last].all() else begin + 1
        return [(at, min(at + self.length, last), last) for at in range(begin, until, self.length)]


def split(cache: TokenCache, percentage: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the documents to train on and the held-out documents, both in their own order.

    All sequences of one record are on the same side.
    """
    places = np.asarray(cache.places)
    record = np.concatenate([np.zeros(1, np.int64), np.cumsum(places[1:] != places[:-1])])  # of each document
    count = int(record[-1]) + 1
    held = min(int(np.ceil(count * percentage / 100)), count - 1) if percentage else 0
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng((seed, 1 << 32)).permutation(count)[:held]] = True
    return np.flatnonzero(~chosen[record]), np.flatnonzero(chosen[record])

"""Preferences of a token cache as units of two sequences, in an order that depends only on seed and epoch.

A unit of DPO and ORPO has the chosen and the rejected answer. A unit of KTO has an answer, and its prompt with the
answer of the record before it, which measures the divergence from the reference. A batch has whole units without
padding.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ckdist.errors import ConfigError
from ckdist.train.batch import PackedBatch
from ckdist.train.data.token_cache import TokenCache
from ckdist.train.data.token_rows import Rows


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(PackedBatch):
    """Units end to end: sequences 2 i and 2 i + 1 are those of `units[i]`. Without units, it has one token."""

    units: np.ndarray  # int64 (units,): their places in the data set
    answers: np.ndarray  # bool (tokens,): the target belongs to the answer
    desirable: np.ndarray  # bool (units,): KTO's label


class _Sequence(NamedTuple):
    """A prompt with an answer. The last token is a target only."""

    ids: np.ndarray  # int32 (tokens + 1,)
    answer: np.ndarray  # bool (tokens + 1,): the token is learned


class PreferenceRows(Rows):
    """Some of a cache's documents as units. A row is a unit.

    Args:
        documents: Indices of the documents, (documents,).
        length: Most tokens of a sequence.
        method: dpo, orpo or kto.
        shuffle: False: the documents' own order, for validation.

    Attributes:
        reference: float64 (units, 2): log-probabilities of the answers before training, set after the rows are made.
        dropped: Number of units with an answer that `length` removes.
    """

    def __init__(
        self, cache: TokenCache, documents: np.ndarray, length: int, seed: int, method: str, shuffle: bool = True
    ) -> None:
        super().__init__(cache, documents, length, seed, shuffle)
        assert cache.learned is not None and cache.labels is not None, "a cache of preferences has both"
        self.method = method
        ends = cache.starts[1:][documents] - cache.starts[documents]
        bounds = zip(cache.starts[documents].tolist(), ends.tolist(), strict=True)
        prompts = np.array([int(np.argmax(cache.learned[begin : begin + size])) for begin, size in bounds])
        units = np.stack([documents, np.roll(documents, 1)], 1) if method == "kto" else documents.reshape(-1, 2)
        kept = prompts <= length if method == "kto" else (prompts.reshape(-1, 2) <= length).all(axis=1)
        self._prompts = dict(zip(documents.tolist(), prompts.tolist(), strict=True))
        self.units, self.dropped = units[kept], int((~kept).sum())
        self.reference = np.zeros((len(self.units), 2))
        if not len(self.units):
            raise ConfigError(f"no answer is left: every prompt is longer than max_length ({length}); raise it")
        if method == "kto" and len(self.units) < 2:
            raise ConfigError("KTO needs two records or more: each prompt is also read with another record's answer")
        self._orders = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng((seed, epoch)).permutation(len(self.units))
        )

    def count(self, epoch: int) -> int:  # noqa: ARG002
        """Number of units, the same in every epoch."""
        return len(self.units)

    def batch(self, epoch: int, indices: range, count: int = 0) -> PreferenceBatch:  # noqa: ARG002
        """The units at the places `indices` of an epoch's order."""
        places = np.asarray(indices, np.int64)
        return self.units_batch(self._orders(epoch)[places] if self.shuffle else places)

    def units_batch(self, units: np.ndarray) -> PreferenceBatch:
        """The batch of some units."""
        if not len(units):
            no_unit, no_target = np.zeros(0, np.int64), np.full(1, -1, np.int32)
            return PreferenceBatch(
                np.zeros(1, np.int32), no_target, np.array([0, 1], np.int32), units=no_unit, answers=no_target > 0,
                desirable=no_unit > 0,
            )  # fmt: skip
        sequences = [sequence for unit in units.tolist() for sequence in self._sequences(unit)]
        ids = [sequence.ids[:-1] for sequence in sequences]
        answers = np.concatenate([sequence.answer[1:] for sequence in sequences])
        targets = np.concatenate([sequence.ids[1:] for sequence in sequences])
        starts = np.cumsum([0, *map(len, ids)]).astype(np.int32)
        wanted = answers.copy()
        if self.method == "orpo":  # the loss of the chosen sequence is of all its tokens
            for begin, end in zip(starts[:-1:2], starts[1::2], strict=True):
                wanted[begin:end] = True
        labels = self.cache.labels
        assert labels is not None, "a cache of preferences has labels"
        return PreferenceBatch(
            np.concatenate(ids),
            np.where(wanted, targets, -1).astype(np.int32),
            starts,
            units=np.asarray(units, np.int64),
            answers=answers,
            desirable=labels[self.units[units, 0]] > 0,
        )

    def _sequences(self, unit: int) -> tuple[_Sequence, _Sequence]:
        first, second = self.units[unit].tolist()
        if self.method != "kto":
            return self._document(first), self._document(second)
        begin, other = int(self.cache.starts[first]), int(self.cache.starts[second])
        size, stop = self._prompts[first], int(self.cache.starts[second + 1])
        answer = self.cache.tokens[other + self._prompts[second] : stop]
        ids = np.concatenate([self.cache.tokens[begin : begin + size], answer]).astype(np.int32)
        mismatched = _Sequence(ids[: self.length + 1], (np.arange(len(ids)) >= size)[: self.length + 1])
        return self._document(first), mismatched

    def _document(self, document: int) -> _Sequence:
        begin, last = int(self.cache.starts[document]), int(self.cache.starts[document + 1])
        end = min(begin + self.length + 1, last)
        assert self.cache.learned is not None, "a cache of preferences has a mask"
        return _Sequence(
            np.asarray(self.cache.tokens[begin:end], np.int32), np.asarray(self.cache.learned[begin:end]) > 0
        )


class RewardRows(PreferenceRows):
    """Chosen and rejected sequences in turn, for a reward model. The target of a last token is label 0."""

    def units_batch(self, units: np.ndarray) -> PreferenceBatch:
        """The batch of some units."""
        if not len(units):
            return super().units_batch(units)
        sequences = [one.ids[: self.length] for unit in units.tolist() for one in self._sequences(unit)]
        starts = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
        ids, targets = np.concatenate(sequences), np.full(starts[-1], -1, np.int32)
        targets[starts[1:] - 1] = 0
        return PreferenceBatch(
            ids, targets, starts, units=np.asarray(units, np.int64), answers=targets == 0,
            desirable=np.ones(len(units), bool),
        )  # fmt: skip

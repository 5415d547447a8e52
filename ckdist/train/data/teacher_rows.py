"""Rows of a token cache with a teacher's choices at each target."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.train.batch import PackedBatch
from ckdist.train.data.teacher_file import TeacherFile, learned_before
from ckdist.train.data.token_rows import Rows


class TeacherRows(Rows):
    """As Rows. `teacher`: a file of the same cache."""

    def __init__(self, teacher: TeacherFile, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._teacher, self._before = teacher, learned_before(self.cache)

    def batch(self, epoch: int, indices: range, count: int) -> PackedBatch:
        """The rows `indices` of an epoch, filled up to `count` rows."""
        batch, choices = super().batch(epoch, indices, count), self._teacher.header.choices
        ids = np.zeros((len(batch.targets), choices), np.int32)
        logprobs = np.zeros((len(batch.targets), choices), np.float32)
        for row, index in enumerate(indices):
            at = row * self.length
            for begin, end, last in self._pieces(epoch, index):
                places = at + np.flatnonzero(batch.targets[at : at + end - begin] >= 0)
                records = self._records(begin, min(end + 1, last), last)
                ids[places], logprobs[places] = records["ids"], records["logprobs"]
                at += end - begin
        return replace(batch, teacher=(ids, logprobs))

    def _records(self, begin: int, end: int, last: int) -> np.ndarray:
        """The records of the learned tokens in (begin, end), of the document that ends at `last`."""
        document = int(np.searchsorted(self.cache.starts, last)) - 1
        first = int(self.cache.starts[document])
        flags: Sequence[int] | np.ndarray = (
            np.ones(end - first, np.uint8) if self.cache.learned is None else self.cache.learned[first:end]
        )
        before = int(np.sum(flags[1 : begin + 1 - first]))
        count = int(np.sum(flags[begin + 1 - first :]))
        start = int(self._before[document]) + before
        return self._teacher.records[start : start + count]

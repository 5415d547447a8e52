"""Pairs of a token cache for a reward model: whole sequences, whose last tokens have the label to predict."""

import numpy as np

from ckdist.train.data.preference_rows import PreferenceBatch, PreferenceRows


class RewardRows(PreferenceRows):
    """Chosen and rejected sequences in turn. The target of a last token is label 0."""

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

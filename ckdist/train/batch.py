"""One step's tokens of one rank: whole sequences laid end to end."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedBatch:
    """Packed sequences: positions count from each one's start, and attention sees its own sequence alone."""

    token_ids: np.ndarray  # int32 (tokens,)
    targets: np.ndarray  # int32 (tokens,): the token to be predicted, -1 where no loss is taken
    starts: np.ndarray  # int32 (sequences + 1,): where the sequences begin, and where the last one ends

    def tokens_to_learn_from(self) -> int:
        """Tokens of sequences that have a target: the others add nothing to a loss."""
        before = np.concatenate([[0], np.cumsum(self.targets >= 0)])
        begin, end = self.starts[:-1], self.starts[1:]
        return int((end - begin)[before[end] > before[begin]].sum())

"""The tokens of one step on one rank: whole sequences end to end."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedBatch:
    """Packed sequences. Positions count from the start of each, and attention stays inside each."""

    token_ids: np.ndarray  # int32 (tokens,)
    targets: np.ndarray  # int32 (tokens,): the token to be predicted; -1: no loss
    starts: np.ndarray  # int32 (sequences + 1,): start of each sequence, and the end of the last
    weights: np.ndarray | None = None  # float32 (tokens,): factor of each token's loss and gradient; None: 1
    # A teacher's most probable tokens at each target: ids, int32, ascending, and log-probabilities, float32; both
    # (tokens, choices).
    teacher: tuple[np.ndarray, np.ndarray] | None = None

    keys: np.ndarray | None = None  # uint32 (tokens,): of the masks of dropout; None: nothing is dropped

    def tokens_to_learn_from(self) -> int:
        """Number of tokens in sequences that have a target. Other sequences add nothing to a loss."""
        before = np.concatenate([[0], np.cumsum(self.targets >= 0)])
        begin, end = self.starts[:-1], self.starts[1:]
        return int((end - begin)[before[end] > before[begin]].sum())

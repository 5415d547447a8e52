"""One step's tokens of one rank: whole sequences laid end to end."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PackedBatch:
    """Packed sequences: positions count from each one's start, and attention sees its own sequence alone."""

    token_ids: np.ndarray  # int32 (tokens,)
    targets: np.ndarray  # int32 (tokens,): the token to be foretold, -1 where no loss is taken
    starts: np.ndarray  # int32 (sequences + 1,): where the sequences begin, and where the last one ends

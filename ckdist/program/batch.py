"""One step's work for the executable: which tokens of which sequences, where their keys go, which logits are wanted."""

from dataclasses import dataclass

import numpy as np

BLOCK_TOKENS = 16  # positions of one KV block


@dataclass(frozen=True)
class Batch:
    """Runs of consecutive tokens, one run per sequence, laid end to end.

    Before a step every run's block table covers its last position; the step writes the run's keys and values there.
    """

    token_ids: np.ndarray  # int32 (tokens,)
    runs: np.ndarray  # int32 (sequences, 3): number of tokens, position of the first, number of blocks
    block_tables: np.ndarray  # int32 (sum of blocks,): the runs' tables end to end
    output_tokens: np.ndarray  # int32 (outputs,): indices into token_ids whose logits are wanted, ascending

"""One step's work for the executable: which tokens of which sequences, where their keys go, which logits are wanted."""

from dataclasses import dataclass

import numpy as np

from ckdist import native

NO_SLOT = -1  # where there is no state yet, or none is saved
BLOCK_TOKENS: int = native.lib.ckdist_block_tokens  # positions of one block of the cache


@dataclass(frozen=True)
class Batch:
    """Chunks of consecutive tokens, one per sequence, laid end to end.

    Before a step every chunk's block table covers its last position; the step writes the chunk's keys and values there.
    """

    token_ids: np.ndarray  # int32 (tokens,)
    chunks: np.ndarray  # int32 (sequences, 3), as struct ckdist_sequence_chunk: tokens, first position, blocks
    block_tables: np.ndarray  # int32 (sum of blocks,): the chunks' tables end to end
    logits_indices: np.ndarray  # int32 (selected,): indices into token_ids whose logits are wanted, ascending
    # int32 (sequences, 4), as struct ckdist_state_slots; None where no layer keeps a state
    states: np.ndarray | None = None
    # int32 (sequences,): of sequences of two texts the tokens of the first, 0 of others; None where there is none
    firsts: np.ndarray | None = None
    hidden: bool = False  # hidden states are wanted in place of logits


def own_slots(slots: int, sequences: range, length: int) -> np.ndarray | None:
    """The state slots of sequences that have those of their own numbers, after `length` tokens; None of 0 `slots`."""
    if slots == 0:
        return None
    own = np.full((len(sequences), 4), NO_SLOT, np.int32)
    own[:, 1] = sequences
    if length:
        own[:, 0] = sequences
    return own

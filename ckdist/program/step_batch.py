"""The input of one step: tokens of sequences, block tables, and the positions whose logits are needed."""

from dataclasses import dataclass

import numpy as np

from ckdist import native

NO_SLOT = -1  # no state to load, or none to save
ADAPTER_USE = np.dtype([("slot", "<i4"), ("scale", "<f8")])
BLOCK_TOKENS: int = native.lib.ckdist_block_tokens  # positions of one block of the cache


@dataclass(frozen=True)
class Batch:
    """Chunks of consecutive tokens, one per sequence, concatenated.

    Before a step, the block table of each chunk must cover its last position. The step writes the keys and values of
    the chunk to these blocks.
    """

    token_ids: np.ndarray  # int32 (tokens,); -1 - i: row i of `embeddings`
    chunks: np.ndarray  # int32 (sequences, 3), struct ckdist_sequence_chunk: tokens, first position, blocks
    block_tables: np.ndarray  # int32 (sum of blocks,): the tables of all chunks, concatenated
    logits_indices: np.ndarray  # int32 (selected,): indices into token_ids whose logits are needed, ascending
    # int32 (sequences, 4), struct ckdist_state_slots; None if no layer keeps a state
    states: np.ndarray | None = None
    # int32 (sequences,): tokens of the first text if a sequence is a pair of texts, else 0; None if none is a pair
    firsts: np.ndarray | None = None
    hidden: bool = False  # return hidden states in place of logits
    # float32 (rows, hidden): inputs of the first layer in place of rows of the embedding table, e.g. of an image
    embeddings: np.ndarray | None = None
    # int32 (tokens, 3): positions in time, height and width, which rotations read. None: each token's place in its
    # sequence. Only for a model whose rotations have axes.
    positions: np.ndarray | None = None
    # ADAPTER_USE (lists, sequences): slots of each sequence's adapters, or -1, and their scales. None: none has one.
    adapters: np.ndarray | None = None
    prompts: bool | None = None  # whether the tokens are prompts', not generated; None: if a chunk has several


def own_slots(slots: int, sequences: range, length: int) -> np.ndarray | None:
    """State slots if each sequence uses the slot of its own number, after `length` tokens; None if `slots` is 0."""
    if slots == 0:
        return None
    own = np.full((len(sequences), 4), NO_SLOT, np.int32)
    own[:, 1] = sequences
    if length:
        own[:, 0] = sequences
    return own

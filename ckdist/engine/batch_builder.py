"""Builds a step's Batch in arrays that are allocated once."""

import itertools

import numpy as np

from ckdist.engine.scheduler import Scheduler
from ckdist.engine.step_builder import SequenceChunk, Step
from ckdist.program.step_batch import ADAPTER_USE, BLOCK_TOKENS, Batch


class BatchBuilder:
    """Builds the batches of one scheduler. The arrays of a Batch are views, valid until the next `build`.

    Args:
        max_positions: Most positions of one sequence.
    """

    def __init__(self, scheduler: Scheduler, max_positions: int) -> None:
        sequences, states = scheduler.max_sequences, scheduler.pool.states is not None
        self._states = np.empty((sequences, 4), np.int32) if states else None
        self._token_ids = np.empty(scheduler.max_tokens, np.int32)
        self._chunks = np.empty((sequences, 3), np.int32)
        self._block_tables = np.empty(sequences * -(-max_positions // BLOCK_TOKENS), np.int32)
        self._logits_indices = np.empty(scheduler.max_outputs, np.int32)

    def build(self, step: Step) -> Batch:
        """Returns the Batch of a step that is not yet committed."""
        tokens = outputs = blocks = 0
        rows: list[tuple[int, int, int]] = []
        for chunk in step.chunks:
            rows.append((chunk.tokens, chunk.first, self._add(chunk, step.hidden, tokens, outputs, blocks)))
            tokens, outputs, blocks = tokens + chunk.tokens, outputs + chunk.rows, blocks + rows[-1][2]
        chunks = self._chunks[: len(rows)]
        chunks[:] = rows
        return Batch(
            self._token_ids[:tokens],
            chunks,
            self._block_tables[:blocks],
            self._logits_indices[:outputs],
            self._state_rows(step),
            _firsts(step),
            step.hidden,
            prompts=True if step.hidden else step.prompts,
            positions=_positions(step),
            adapters=_adapters(step),
        )

    def _add(self, chunk: SequenceChunk, hidden: bool, begin: int, outputs: int, block: int) -> int:
        """Writes a chunk at these offsets. Returns its number of blocks."""
        sequence, first, tokens, _, wanted, *_ = chunk
        end, blocks = begin + tokens, -(-max(first + tokens, sequence.first_text) // BLOCK_TOKENS)
        ids = sequence.tokens if sequence.source is None or not hidden else sequence.source
        self._token_ids[begin:end] = ids[first : first + tokens]
        self._block_tables[block : block + blocks] = sequence.block_table[:blocks]
        if wanted == 1:
            self._logits_indices[outputs] = end - 1
        else:
            self._logits_indices[outputs : outputs + wanted] = range(end - wanted, end)
        return blocks

    def _state_rows(self, step: Step) -> np.ndarray | None:
        """The chunks' state slots, int32 (chunks, 4), or None if no layer keeps states."""
        if self._states is None:
            return None
        states = self._states[: len(step.chunks)]
        states[:] = [chunk.states for chunk in step.chunks]
        return states


def _positions(step: Step) -> np.ndarray | None:
    """Positions of three axes, int32 (tokens, 3), or None if no sequence has them."""
    if all(chunk.sequence.positions is None for chunk in step.chunks):
        return None
    return np.concatenate([chunk.sequence.positions_of(chunk.first, chunk.tokens) for chunk in step.chunks])


def _adapters(step: Step) -> np.ndarray | None:
    """Adapters and scales of each chunk, ADAPTER_USE (lists, chunks). None if no sequence has an adapter."""
    uses = [chunk.sequence.adapters for chunk in step.chunks]
    if not any(uses):
        return None
    lists = itertools.zip_longest(*([(use.slot, use.scale) for use in own] for own in uses), fillvalue=(-1, 0.0))
    return np.array([list(one) for one in lists], ADAPTER_USE)


def _firsts(step: Step) -> np.ndarray | None:
    """Tokens of each chunk's first text, int32 (chunks,), or None if no sequence has two texts."""
    firsts = [chunk.sequence.first_text for chunk in step.chunks]
    return np.array(firsts, np.int32) if any(firsts) else None

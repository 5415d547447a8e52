"""A step's Batch, laid down in arrays that are allocated once."""

import numpy as np

from ckdist.engine.sequence import Sequence
from ckdist.program.batch import BLOCK_TOKENS, Batch


class BatchBuilder:
    """Takes runs one by one. The arrays of a built Batch are views that hold until `clear`."""

    def __init__(
        self, max_tokens: int, max_sequences: int, max_outputs: int, max_positions: int, states: bool = False
    ) -> None:
        """Sizes of the largest step; `max_positions` of one sequence. states: whether sequences have state slots."""
        self._states = np.empty((max_sequences, 4), np.int32) if states else None
        self._token_ids = np.empty(max_tokens, np.int32)
        self._runs = np.empty((max_sequences, 3), np.int32)
        self._block_tables = np.empty(max_sequences * -(-max_positions // BLOCK_TOKENS), np.int32)
        self._logits_indices = np.empty(max_outputs, np.int32)
        self.clear()

    def clear(self) -> None:
        """Begins a new step."""
        self.tokens = self.outputs = self._blocks = 0
        self._rows: list[tuple[int, int, int]] = []
        self._firsts: list[int] = []
        self._state_rows: list[tuple[int, int, int, int]] = []

    def add(self, sequence: Sequence, tokens: int, outputs: int) -> None:
        """The next `tokens` tokens of `sequence`; the logits of the last `outputs` of them are wanted."""
        first, begin, block = sequence.computed, self.tokens, self._blocks
        end = begin + tokens
        blocks = -(-(first + tokens) // BLOCK_TOKENS)
        self._token_ids[begin:end] = sequence.tokens[first : first + tokens]
        self._block_tables[block : block + blocks] = sequence.block_table[:blocks]
        if outputs == 1:
            self._logits_indices[self.outputs] = end - 1
        else:
            self._logits_indices[self.outputs : self.outputs + outputs] = range(end - outputs, end)
        self._rows.append((tokens, first, blocks))
        self._firsts.append(sequence.first_text)
        if sequence.state_slots is not None:
            self._state_rows.append(sequence.state_slots.row(first))
        self.tokens, self._blocks, self.outputs = end, block + blocks, self.outputs + outputs

    def build(self, hidden: bool = False) -> Batch:
        """The step's Batch; `hidden`: hidden states are wanted in place of logits."""
        runs = self._runs[: len(self._rows)]
        runs[:] = self._rows
        states = None if self._states is None else self._states[: len(self._rows)]
        if states is not None:
            states[:] = self._state_rows
        return Batch(
            self._token_ids[: self.tokens],
            runs,
            self._block_tables[: self._blocks],
            self._logits_indices[: self.outputs],
            states,
            np.array(self._firsts, np.int32) if any(self._firsts) else None,
            hidden,
        )

"""Drafts of the model's own layer that predicts the token after the next one (`--spec mtp`).

The layer reads a token and the row that the model's head read for the token before. Rows exist where logits do, so the
layer's cache begins at the first token of an answer. A drafted token has the layer's own row in place of the model's.
When the model has verified it, the layer reads it again with the model's row.
"""

from dataclasses import dataclass, field

import numpy as np

from ckdist.engine.model_drafter import BEHIND, Follower, ModelDrafter
from ckdist.engine.sampler import Sampler
from ckdist.engine.sequence import Sequence, State
from ckdist.engine.step_builder import SequenceChunk
from ckdist.program.executable import Executable

MOST_ROWS = 4 * BEHIND  # rows that wait for a draft; with more, the layer's cache begins again


@dataclass
class RowFollower(Follower):
    """A sequence as the layer has it."""

    rows: list[np.ndarray] = field(default_factory=list[np.ndarray])  # the model's, of the tokens from `end` on
    # the layer's row for the token after its last one
    own: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    def see(self, sequence: Sequence) -> None:
        """As for a draft model, but all drafted tokens are taken back."""
        if self.guesses:
            self.end = min(self.end, self.base)
        super().see(sequence)


class LayerDrafter(ModelDrafter):
    """Runs the layer on all ranks, between the steps of the model.

    Args:
        target: The model's executable, which leaves the rows of its last step.
    """

    def __init__(self, executable: Executable, sampler: Sampler, most_token: int, target: Executable) -> None:
        super().__init__(executable, sampler, most_token)
        self._target = target

    def take(self, chunk: SequenceChunk, agreed: int) -> None:
        """Takes the rows of a collected step: those of a sequence's tokens that have a next token."""
        sequence = chunk.sequence
        first = chunk.first + chunk.tokens - chunk.rows  # of the tokens with rows
        count = min(chunk.rows - len(chunk.drafts) + agreed, sequence.length - 1 - first)
        if count <= 0 or sequence.pooling is not None or sequence.state is State.FINISHED:
            return
        follower = self._followers.get(sequence.id)
        if follower is None:
            rates = self._acceptance.of_sequence(), self._rate.of_sequence()
            follower = self._followers[sequence.id] = RowFollower(first + 1, [], *rates, offset=first + 1)
        assert isinstance(follower, RowFollower)  # only these are made
        follower.see(sequence)
        rows = self._target.output_rows()[chunk.row : chunk.row + count]
        if first + 1 != follower.end + len(follower.rows) or len(follower.rows) + count > MOST_ROWS:
            rows = rows[-MOST_ROWS:]
            follower.rows, follower.end = [], first + 1 + count - len(rows)
            follower.offset = follower.end
        follower.rows += list(rows.copy())

    def read(self, sequence: Sequence, is_free: bool) -> bool:  # noqa: ARG002
        """Returns False: prompts have no rows."""
        return False

    def is_ready(self, sequence: Sequence) -> bool:
        """True if a draft may follow the sequence's tokens at once."""
        follower = self._followers.get(sequence.id)
        return (
            isinstance(follower, RowFollower)
            and follower.end < sequence.length == follower.end + len(follower.rows)
            and self._extend(follower, sequence)
        )

    def _run(self, items: list[tuple[Follower, np.ndarray]], wants_logits: bool) -> np.ndarray:
        logits = super()._run(items, wants_logits)
        for (follower, _), row in zip(items, self.executable.output_rows(), strict=False):
            if isinstance(follower, RowFollower):
                follower.rows, follower.own = [], row.copy()
        return logits

    def _inputs(self, follower: Follower, tokens: np.ndarray) -> np.ndarray:
        if isinstance(follower, RowFollower):
            return np.stack(follower.rows or [follower.own])
        return np.zeros((len(tokens), self.executable.spec.hidden_size), np.float32)

    def leave(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence. Their positions are not those of a prompt, so nothing shares them."""
        if (follower := self._followers.pop(sequence.id, None)) is not None:
            follower.see(sequence)
            self._pool.release(follower.blocks, 0)

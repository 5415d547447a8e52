"""Several sequences of one length driven straight through an executable, one token of each per step: for benchmarks."""

import numpy as np

from ckdist.engine.protocol import StepExecutable
from ckdist.errors import CapacityError
from ckdist.program.batch import BLOCK_TOKENS, Batch, own_slots


class LockstepSequences:
    """Divides the executable's whole cache evenly among `count` sequences while it lives.

    CapacityError where the executable was not sized for so many.
    """

    def __init__(self, executable: StepExecutable, count: int) -> None:
        """`count` empty sequences."""
        most = min(executable.max_sequences, executable.max_tokens)
        if count > most:
            raise CapacityError(
                f"{count} sequences at once, and the buffers are sized for {most}: use --parallel {count}"
            )
        self.executable, self.count = executable, count
        self.length = 0
        self._runs = np.ones((count, 3), np.int32)  # of one token each
        self._every = np.arange(count, dtype=np.int32)
        # (sequences, blocks)
        self._tables = np.arange(executable.num_blocks // count * count, dtype=np.int32).reshape(count, -1)

    def fill(self, token_ids: np.ndarray) -> None:
        """Continues every sequence by the same int32 (tokens,), in chunks; what they are is of no account to a
        benchmark.
        """
        for begin in range(0, len(token_ids), self.executable.max_tokens):
            chunk = np.asarray(token_ids[begin : begin + self.executable.max_tokens], np.int32)
            blocks = self._blocks(self.length + len(chunk))
            for i, table in enumerate(self._tables):
                self.executable.run(
                    Batch(
                        chunk,
                        np.array([[len(chunk), self.length, blocks]], np.int32),
                        table[:blocks],
                        np.zeros(0, np.int32),
                        own_slots(self.executable.state_slots, range(i, i + 1), self.length),
                    )
                )
            self.length += len(chunk)

    def step(self, token_ids: np.ndarray) -> np.ndarray:
        """Continues every sequence by its token of int32 (count,).

        Returns float32 (count, vocab) logits, valid until the next step.
        """
        blocks = self._blocks(self.length + 1)
        self._runs[:, 1:] = self.length, blocks
        logits = self.executable.run(
            Batch(
                np.asarray(token_ids, np.int32),
                self._runs,
                self._tables[:, :blocks].reshape(-1),
                self._every,
                own_slots(self.executable.state_slots, range(self.count), self.length),
            )
        )
        self.length += 1
        return logits

    def _blocks(self, length: int) -> int:
        """Blocks of a sequence of so many tokens; CapacityError where there are not as many."""
        blocks = -(-length // BLOCK_TOKENS)
        if blocks > self._tables.shape[1] or length > self.executable.context_length:
            raise CapacityError(
                f"{self.count} sequences of {length} tokens do not fit a cache of "
                f"{self.executable.num_blocks * BLOCK_TOKENS}: use a larger --kv-memory or fewer"
            )
        return blocks

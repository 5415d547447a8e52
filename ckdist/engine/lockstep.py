"""Sequences of one length that run directly on an executable, token by token: for benchmarks."""

from collections.abc import Iterator

import numpy as np

from ckdist.errors import CapacityError
from ckdist.layout import even_ranges
from ckdist.program.executable import Executable
from ckdist.program.step_batch import BLOCK_TOKENS, Batch, own_slots


class LockstepSequences:
    """Divides the executable's whole cache evenly among `count` sequences.

    Raises CapacityError if the executable's buffers are too small for `count` sequences.
    """

    def __init__(self, executable: Executable, count: int) -> None:
        most = min(executable.max_sequences, executable.max_tokens)
        if count > most:
            raise CapacityError(
                f"{count} sequences at once, and the buffers are sized for {most}: use --parallel {count}"
            )
        self.executable, self.count = executable, count
        self.length = 0
        # one group per step, so that all stages have work
        self._groups = [range(*group) for group in even_ranges(count, executable.costs.groups(count))]
        # (sequences, blocks)
        self._tables = np.arange(executable.num_blocks // count * count, dtype=np.int32).reshape(count, -1)

    def fill(self, token_ids: np.ndarray) -> None:
        """Continues every sequence by the same tokens, int32 (tokens,), in chunks.

        Their values do not matter to a benchmark.
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

    def run(self, token_ids: np.ndarray) -> Iterator[np.ndarray]:
        """Continues every sequence by its column of int32 (tokens, count), one token at a time.

        A sequence's next token follows once the logits before it are there.

        Yields:
            float32 (sequences, vocab) logits, valid until the next: for each token one part per group of sequences.
        """
        under_way = 0
        for tokens in np.asarray(token_ids, np.int32):
            blocks = self._blocks(self.length + 1)
            for group in self._groups:
                if under_way == len(self._groups):
                    yield self.executable.collect()
                    under_way -= 1
                self.executable.publish(self._batch(tokens, group, blocks))
                under_way += 1
            self.length += 1
        for _ in range(under_way):
            yield self.executable.collect()

    def _batch(self, tokens: np.ndarray, group: range, blocks: int) -> Batch:
        """The next token of the sequences in `group`; `tokens` is int32 (count,)."""
        runs = np.ones((len(group), 3), np.int32)  # one token per sequence
        runs[:, 1:] = self.length, blocks
        own = slice(group.start, group.stop)
        states = own_slots(self.executable.state_slots, group, self.length)
        tables = self._tables[own, :blocks].reshape(-1)
        return Batch(tokens[own], runs, tables, np.arange(len(group), dtype=np.int32), states)

    def _blocks(self, length: int) -> int:
        """Blocks of a sequence of `length` tokens. Raises CapacityError if they do not fit its part of the cache."""
        blocks = -(-length // BLOCK_TOKENS)
        if blocks > self._tables.shape[1] or length > self.executable.context_length:
            raise CapacityError(
                f"{self.count} sequences of {length} tokens do not fit a cache of "
                f"{self.executable.num_blocks * BLOCK_TOKENS}: use a larger --kv-memory or fewer"
            )
        return blocks

"""One sequence that runs directly on an executable, without a scheduler: for scoring, benchmarks and tests."""

import numpy as np

from ckdist.engine.request import Tokens
from ckdist.errors import CapacityError
from ckdist.program.executable import Executable
from ckdist.program.step_batch import BLOCK_TOKENS, Batch, own_slots


class SingleSequence:
    """Owns the executable's whole cache while it lives: blocks 0, 1, 2 ... in order."""

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        self.length = 0
        self._blocks = np.arange(executable.num_blocks, dtype=np.int32)

    def feed(self, token_ids: Tokens, outputs: str = "all") -> np.ndarray:
        """Continues the sequence by `token_ids` in chunks, with several under way if the executable allows that.

        Args:
            outputs: "all", "last" or "none".

        Returns:
            float32 logits: (tokens, vocab) for "all", (1, vocab) for "last", (0, vocab) for "none".

        Raises:
            CapacityError: The sequence would outgrow the context.
        """
        ids = np.asarray(token_ids, np.int32)
        limit = min(self.executable.context_length, self.executable.num_blocks * BLOCK_TOKENS)
        if self.length + len(ids) > limit:
            raise CapacityError(
                f"{self.length + len(ids)} tokens do not fit a context of {limit}: "
                f"use --ctx-size {self.length + len(ids)} or a shorter text"
            )
        kept = [np.zeros((0, self.executable.vocab_size), np.float32)]
        executable, under_way = self.executable, 0
        costs, begin, end = executable.costs, 0, self.length + len(ids)
        work = costs.work(self.length, end)
        piece = work / costs.pieces(work)
        while begin < len(ids):
            left = costs.work(self.length, end)
            chunk = ids[begin : begin + costs.piece_tokens(piece, left, self.length, executable.max_tokens)]
            last = begin + len(chunk) == len(ids)
            wanted = (
                np.arange(len(chunk))
                if outputs == "all"
                else np.array([len(chunk) - 1] if last and outputs == "last" else [])
            )
            blocks = -(-(self.length + len(chunk)) // BLOCK_TOKENS)
            runs = np.array([[len(chunk), self.length, blocks]], np.int32)
            states = own_slots(self.executable.state_slots, range(1), self.length)
            if under_way == executable.in_flight:
                kept.append(executable.collect().copy())
                under_way -= 1
            executable.publish(Batch(chunk, runs, self._blocks[:blocks], wanted.astype(np.int32), states))
            under_way += 1
            self.length, begin = self.length + len(chunk), begin + len(chunk)
        kept += [executable.collect().copy() for _ in range(under_way)]
        return np.concatenate(kept)  # chunks whose logits are not wanted have no rows

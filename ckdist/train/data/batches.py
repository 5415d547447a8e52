"""Deals rows to ranks and micro-batches. Every rank computes its own part of a step, and all know the step's size.

The rows of a step depend on the position in the data and on the number of rows of a step, not on the ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ckdist.errors import ConfigError
from ckdist.layout import even_ranges
from ckdist.train.batch import PackedBatch
from ckdist.train.data.token_rows import Rows

EVAL_ROWS = 256  # most rows of max_length of a validation loss


@dataclass(frozen=True)
class Position:
    """The next row to be read."""

    epoch: int = 0
    row: int = 0


class FileBatches:
    """Steps over the rows of a data set, epoch after epoch.

    Args:
        per_device: Rows of a micro-batch.
        accumulation: Micro-batches of a step.
        dropout_seed: Seed of the keys of LoRA's dropout; None: batches have none.
        rows_of_step: Rows of a step over all ranks, if it is not 0: `accumulation` follows from it.
        replicas: The ranks that `accumulation` is for, if more than `size`: the others compute their rows.

    Attributes:
        position: The first row of the next step.
        rows_of_step: Rows of a step over all ranks.
    """

    def __init__(
        self,
        rows: Rows,
        rank: int,
        size: int,
        per_device: int,
        accumulation: int,
        replicas: int = 0,
        dropout_seed: int | None = None,
        rows_of_step: int = 0,
    ) -> None:
        self.rows, self.rank, self.size, self.per_device = rows, rank, size, per_device
        self.rows_of_step = rows_of_step or max(replicas, size) * per_device * accumulation
        self.accumulation = -(-self.rows_of_step // (size * per_device))
        self.position, self.dropout_seed = Position(), dropout_seed

    def steps_left(self, epochs: float) -> int:
        """Steps from the position to the end of `epochs` epochs. The last step of an epoch may be smaller."""
        steps_of = lambda rows: -(-rows // self.rows_of_step)
        first = steps_of(self.rows.count(self.position.epoch) - self.position.row)
        done = self.position.row / max(1, self.rows.count(self.position.epoch))
        left = epochs - self.position.epoch - done
        if left <= 0:
            return 0
        whole = steps_of(self.rows.count(0))
        return int(np.ceil(first * min(1.0, left / (1 - done)) + whole * max(0.0, left - (1 - done)) - 1e-9))

    def take(self) -> list[PackedBatch]:
        """Returns this rank's micro-batches of the next step, and advances the position."""
        epoch, first = self.position.epoch, self.position.row
        total = self.rows.count(epoch)
        count = min(self.rows_of_step, total - first)
        after = first + count
        self.position = Position(epoch, after) if after < total else Position(epoch + 1, 0)
        micro = min(self.accumulation, -(-count // (self.size * self.per_device)))
        shares = even_ranges(count, micro * self.size)
        return [self._batch(epoch, first, shares[index * self.size + self.rank]) for index in range(micro)]

    def _batch(self, epoch: int, first: int, share: tuple[int, int]) -> PackedBatch:
        """Rows [begin, end) of `share`, counted from `first`, as a batch."""
        rows = range(first + share[0], first + share[1])
        batch = self.rows.batch(epoch, rows, self.per_device)
        return batch if self.dropout_seed is None else replace(batch, keys=self._keys(epoch, rows, self.dropout_seed))

    def _keys(self, epoch: int, rows: range, seed: int) -> np.ndarray:
        """A random number for each token. It depends on the seed and the place in the data, not on the ranks."""
        length, random = self.rows.length, np.random.default_rng
        keys = np.zeros(self.per_device * length, np.uint32)
        for index, row in enumerate(rows):
            own = random((seed, epoch, row, 4)).integers(0, 1 << 32, length, np.uint32)
            keys[index * length : (index + 1) * length] = own
        return keys


class OwnBatches:
    """Steps from a user's function, which must return the same for the same arguments.

    Args:
        source: source(step, rank, size) returns batches.
        tokens: Batches are padded to this many tokens.
    """

    def __init__(self, source: Callable[[int, int, int], list[PackedBatch]], rank: int, size: int, tokens: int) -> None:
        self.source, self.rank, self.size, self.tokens, self.position = source, rank, size, tokens, Position()

    def take(self) -> list[PackedBatch]:
        """Returns this rank's batches of the next step. Raises ConfigError for an invalid batch."""
        batches = list(self.source(self.position.row, self.rank, self.size))
        self.position = Position(0, self.position.row + 1)
        return [
            self._filled(batch)
            for batch in batches or [PackedBatch(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(1, np.int32))]
        ]

    def _filled(self, batch: PackedBatch) -> PackedBatch:
        """Pads a batch by a sequence without targets."""
        ids, targets, starts = (np.asarray(array, np.int32) for array in (batch.token_ids, batch.targets, batch.starts))
        size = len(ids)
        if (
            size > self.tokens
            or len(targets) != size
            or not len(starts)
            or starts[0] != 0
            or starts[-1] != size
            or (np.diff(starts) <= 0).any()
        ):
            raise ConfigError(
                f"the batch source gave {size} token_ids, {len(targets)} targets and starts {starts.tolist()[:8]}; "
                f"at most {self.tokens} of both, and starts from 0 up to their number, are possible"
            )
        if size == self.tokens:
            return PackedBatch(ids, targets, starts)
        fill = np.zeros(self.tokens - size, np.int32)
        return PackedBatch(
            np.concatenate([ids, fill]), np.concatenate([targets, fill - 1]), np.append(starts, np.int32(self.tokens))
        )


def validation_batches(rows: Rows, rank: int, size: int, per_device: int) -> Iterator[PackedBatch]:
    """This rank's batches of at most EVAL_ROWS rows. Every row goes to one rank; all have the same number."""
    count = min(rows.count(0), EVAL_ROWS)
    begin, end = even_ranges(count, size)[rank]
    for first in range(begin, begin - (-count // size), per_device):
        yield rows.batch(0, range(min(end, first), min(end, first + per_device)), per_device)

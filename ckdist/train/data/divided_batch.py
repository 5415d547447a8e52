"""Batches whose tokens ranks divide: the part of one rank.

A batch is divided into 2 N chunks of equal length for N ranks. Rank r has the chunks r and 2 N - 1 - r. A query sees
all keys before it, so this gives all ranks the same work.
"""

from dataclasses import replace

import numpy as np

from ckdist.errors import ConfigError
from ckdist.models.spec import ModelSpec
from ckdist.program.program import Program
from ckdist.train.batch import PackedBatch

UNIT = 16  # tokens: chunks are multiples of a tile
# ops that read the state of the tokens before
STATES = ("delta_packed", "convolve")


def tokens_of_rank(tokens: int, ranks: int) -> int:
    """Tokens of each rank's part of a batch of `tokens`."""
    return 2 * UNIT * -(-tokens // (2 * UNIT * ranks))


def check_divided(spec: ModelSpec, program: Program, ranks: int) -> None:
    """Raises ConfigError for a model whose sequences cannot be divided."""
    if spec.balance_coefficient:
        raise ConfigError(
            f"sequence_parallel_size ({ranks}) must be 1 with a load-balancing loss of experts, which is of whole "
            "sequences: set router_aux_loss_coef to 0"
        )
    if any(instr.op in STATES for instr in program.instrs):
        raise ConfigError(
            f"sequence_parallel_size ({ranks}) must be 1 for {spec.family}: its layers pass a state from token to token"
        )


def own_part(batch: PackedBatch, ranks: int, rank: int) -> PackedBatch:
    """A rank's tokens of a batch. `starts` stay those of the whole batch.

    Sequences without a target are left out. A last sequence without targets fills the chunks up.
    """
    learned = np.concatenate([[0], np.cumsum(batch.targets >= 0)])
    begin, end = batch.starts[:-1], batch.starts[1:]
    is_learned = learned[end] > learned[begin]
    whole = np.flatnonzero(np.repeat(is_learned, end - begin))
    size = tokens_of_rank(max(1, len(whole)), ranks)
    starts = np.concatenate([[0], np.cumsum((end - begin)[is_learned])])
    if starts[-1] < size * ranks:
        starts = np.append(starts, size * ranks)
    chunks = [np.arange(c * size // 2, (c + 1) * size // 2) for c in (rank, 2 * ranks - 1 - rank)]
    places = np.concatenate(chunks)  # of this rank's tokens among `whole`
    is_given = places < len(whole)

    def part(array: np.ndarray, fill: float) -> np.ndarray:
        """The rank's elements of an array by token."""
        result = np.full((size, *array.shape[1:]), fill, array.dtype)
        result[is_given] = array[whole[places[is_given]]]
        return result

    teacher = None
    if batch.teacher is not None:
        ids, logprobs = batch.teacher
        teacher = part(ids, 0), part(logprobs, 0.0)
    return replace(
        batch,
        token_ids=part(batch.token_ids, 0),
        targets=part(batch.targets, -1),
        starts=starts.astype(np.int32),
        weights=None if batch.weights is None else part(batch.weights, 0.0),
        teacher=teacher,
        keys=None if batch.keys is None else part(batch.keys, 0),
    )

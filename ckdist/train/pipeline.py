"""One step's batches through a rank's stage, in the order of 1F1B."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckdist.train.batch import PackedBatch
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.one_f_one_b import passes
from ckdist.train.stage import TrainingStage


@dataclass(frozen=True)
class StepSums:
    """The results of one step on this rank."""

    loss: float  # sum of losses; 0 on ranks without the model's last layers
    balance: float  # sum of load-balancing losses; 0 on the same ranks
    busy: float  # seconds in which this rank did not wait for other stages
    units: int | None = None  # of preferences: the loss and its gradient are sums over them
    metrics: Mapping[str, float] | None = None  # of preferences, over all replicas


def forward_backward(executable: NativeExecutable, stage: TrainingStage, batches: Sequence[PackedBatch]) -> StepSums:
    """Computes the losses and gradients of one step from zero. A collective call with the executable's errors."""
    executable.zero_grad()
    chunks = len(stage.chunks)
    if chunks > 1:
        batches = _filled_up(batches, stage.count)
    loss = balance = busy = 0.0
    for each in passes(stage.number, stage.count, chunks, len(batches)):
        batch, slot = batches[each.batch], each.batch % max(1, stage.waiting[each.chunk])
        began = time.perf_counter()
        if each.backward:
            is_last = each.batch == len(batches) - 1
            loss += executable.forward_backward(batch, is_last, each.chunk, slot)
            balance += executable.balance
        else:
            executable.forward(batch, each.chunk, slot)
        busy += time.perf_counter() - began - executable.waited
    executable.flush()
    return StepSums(loss, balance, busy)


def _filled_up(batches: Sequence[PackedBatch], stages: int) -> list[PackedBatch]:
    """Adds empty batches: interleaved stages need a multiple of their number."""
    empty = PackedBatch(np.zeros(1, np.int32), np.full(1, -1, np.int32), np.array([0, 1], np.int32))
    return [*batches, *[empty] * (-len(batches) % stages)]

"""The mesh of a training's ranks, and the communicators of its axes.

Replicas (`dp`) train on different parts of each batch. The ranks of a replica train on the same sequences: those along
`sp` have different tokens, stages (`pp`) have different layers, and the ranks of a stage (`tp`) have shards of their
weights. The axis of experts (`ep`) is not supported in training yet.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckdist.comm.communicator import Communicator
from ckdist.launcher.job import FULL_RANKS_VARIABLE
from ckdist.mesh import Mesh
from ckdist.train.config import TrainConfig


def training_mesh(config: TrainConfig, ranks: int, rank: int) -> Mesh:
    """The mesh of a configuration. Raises ConfigError if the ranks do not fill it."""
    return Mesh.of_job(
        ranks,
        rank,
        dp=0 if FULL_RANKS_VARIABLE in os.environ else config.data_parallel_size,
        sp=config.sequence_parallel_size,
        pp=config.pipeline_parallel_size,
        tp=config.tensor_parallel_size,
    )


def full_replicas(mesh: Mesh) -> int:
    """Replicas with which a launcher started the job, if it continues with fewer; else those of the mesh."""
    replicas = mesh.size("dp")
    ranks = math.prod(mesh.axes.values()) // replicas  # of each
    return max(replicas, int(os.environ.get(FULL_RANKS_VARIABLE, "0")) // ranks)


def accumulated_batches(config: TrainConfig, mesh: Mesh) -> int:
    """Most batches of a replica in one step: of a global_batch_size, or gradient_accumulation_steps.

    They are more than these if replicas are missing.
    """
    if config.global_batch_size:
        return -(-config.global_batch_size // (mesh.size("dp") * config.per_device_train_batch_size))
    return -(-config.gradient_accumulation_steps * full_replicas(mesh) // mesh.size("dp"))


@dataclass(frozen=True)
class TrainingRanks:
    """One rank's place in the mesh, and its communicators. None: the group would have one rank."""

    mesh: Mesh
    every: Communicator | None = None
    data: Communicator | None = None  # the ranks with the same shard, which have other tokens
    tensor: Communicator | None = None  # the ranks of this stage
    stages: Communicator | None = None  # one rank per stage, in order
    replica: Communicator | None = None  # the ranks with the same tokens
    ends: Communicator | None = None  # the ranks of `stages` of the first and last stage; None on others
    sequence: Communicator | None = None  # the ranks that divide the tokens of this replica's sequences

    @staticmethod
    def split(mesh: Mesh, every: Communicator | None) -> "TrainingRanks":
        """Splits the communicator of all ranks by axes. A collective call."""
        if every is None:
            return TrainingRanks(mesh)
        stages, ends = mesh.split(every, "pp"), None
        if stages is not None:
            ends = stages.split(color=0 if stages.rank in (0, stages.size - 1) else -1)
        axes = ("dp", "sp"), ("tp",), ("pp", "tp"), ("sp",)
        data, tensor, replica, sequence = (mesh.split(every, *names) for names in axes)
        return TrainingRanks(mesh, every, data, tensor, stages, replica, ends, sequence)

    @property
    def counts_tokens(self) -> bool:
        """True if this rank counts the tokens of its replica's sequences: the first of those that divide them."""
        return self.sequence is None or self.sequence.rank == 0

    @property
    def has_first_tokens(self) -> bool:
        """True if this rank is in the first replica, and `counts_tokens`."""
        return self.mesh.index("dp") == 0 and self.counts_tokens

    @property
    def speaks(self) -> bool:
        """True if this rank represents its stage: the first of the ranks with the same layers."""
        return self.mesh.index("tp") == 0

    @property
    def has_loss(self) -> bool:
        """True if this rank has the loss of its tokens, and represents the ranks with the same tokens."""
        return self.speaks and self.mesh.index("pp") == self.mesh.size("pp") - 1

    def sum(self, *values: float) -> list[float]:
        """Sums each value over all ranks, in rank order. A collective call."""
        own = np.array(values, np.float64)
        if self.every is None:
            return own.tolist()
        return self.every.all_gather(own).reshape(self.every.size, -1).sum(axis=0).tolist()

    def sum_replicas(self, *values: float) -> list[float]:
        """Sums each value over the ranks that `has_loss`: one for all ranks with the same tokens. A collective call."""
        return self.sum(*(value if self.has_loss else 0.0 for value in values))

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order, as JSON. A collective call.

        `World.gather` would do so over MPI, which ends a job by words of its own if a rank dies meanwhile.
        """
        if self.every is None:
            return [value]
        own = np.array(bytearray(json.dumps(value).encode()), np.uint8)
        sizes = self.every.all_gather(np.array([own.size], np.int64)).tolist()
        parts = np.split(self.every.all_gather(own, sizes), np.cumsum(sizes)[:-1])
        return [json.loads(part.tobytes()) for part in parts]

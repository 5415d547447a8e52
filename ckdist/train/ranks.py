"""The ranks of a training: their mesh, and the communicators of its axes.

Replicas (`dp`) have their own part of each batch. The ranks of a replica (`tp`) have the same sequences, each with its
shard of the weights. Stages and experts have their places in the mesh and are not trained over yet.
"""

from dataclasses import dataclass

import numpy as np

from ckdist.comm.communicator import Communicator
from ckdist.errors import ConfigError
from ckdist.mesh import Mesh
from ckdist.train.config import TrainConfig

UNSUPPORTED = {"pp": ("pipeline_parallel_size", "stages"), "ep": ("expert_parallel_size", "experts")}


def training_mesh(config: TrainConfig, ranks: int, rank: int) -> Mesh:
    """The mesh that a configuration asks for. ConfigError where ranks do not make it up, or it is not trained over."""
    sizes = {
        "dp": config.data_parallel_size,
        "pp": config.pipeline_parallel_size,
        "ep": config.expert_parallel_size,
        "tp": config.tensor_parallel_size,
    }
    for axis, (name, what) in UNSUPPORTED.items():
        if sizes[axis] > 1:
            raise ConfigError(
                f"{name} ({sizes[axis]}) must be 1: training shards batches and tensors over ranks, not {what}"
            )
    return Mesh.of_job(ranks, rank, **sizes)


@dataclass(frozen=True)
class TrainingRanks:
    """One rank's place, and whom it meets; None where it would meet nobody."""

    mesh: Mesh
    every: Communicator | None = None
    data: Communicator | None = None  # the ranks that have the same shard, one of each replica
    tensor: Communicator | None = None  # the ranks of this replica

    @staticmethod
    def split(mesh: Mesh, every: Communicator | None) -> "TrainingRanks":
        """The communicators of the axes, of that of all ranks. A collective call."""
        if every is None:
            return TrainingRanks(mesh)
        return TrainingRanks(mesh, every, mesh.split(every, "dp"), mesh.split(every, "tp"))

    @property
    def speaks(self) -> bool:
        """Whether this rank tells what all ranks of its replica know."""
        return self.mesh.index("tp") == 0

    def sum(self, *values: float) -> list[float]:
        """Each summed over all ranks, in their order. A collective call."""
        own = np.array(values, np.float64)
        if self.every is None:
            return own.tolist()
        return self.every.all_gather(own).reshape(self.every.size, -1).sum(axis=0).tolist()

    def sum_replicas(self, *values: float) -> list[float]:
        """Each summed over the replicas, of which one rank each counts. A collective call."""
        return self.sum(*(value if self.speaks else 0.0 for value in values))

"""The ranks of a training: their mesh, and the communicators of its axes.

Replicas (`dp`) have their own part of each batch. The ranks of a replica have the same sequences: stages (`pp`) each
with its layers, and the ranks of a stage (`tp`) each with its shard of their weights. Experts have their place in the
mesh and are not trained over yet.
"""

from dataclasses import dataclass

import numpy as np

from ckdist.comm.communicator import Communicator
from ckdist.errors import ConfigError
from ckdist.mesh import Mesh
from ckdist.train.config import TrainConfig


def training_mesh(config: TrainConfig, ranks: int, rank: int) -> Mesh:
    """The mesh that a configuration asks for. ConfigError where ranks do not make it up, or it is not trained over."""
    sizes = {
        "dp": config.data_parallel_size,
        "pp": config.pipeline_parallel_size,
        "ep": config.expert_parallel_size,
        "tp": config.tensor_parallel_size,
    }
    if sizes["ep"] > 1:
        raise ConfigError(
            f"expert_parallel_size ({sizes['ep']}) must be 1: training divides batches, layers and tensors over ranks, "
            "not experts"
        )
    return Mesh.of_job(ranks, rank, **sizes)


@dataclass(frozen=True)
class TrainingRanks:
    """One rank's place, and whom it meets; None where it would meet nobody."""

    mesh: Mesh
    every: Communicator | None = None
    data: Communicator | None = None  # the ranks that have the same shard, one of each replica
    tensor: Communicator | None = None  # the ranks of this stage
    stages: Communicator | None = None  # one rank of each stage, in their order
    replica: Communicator | None = None  # the ranks of this replica
    ends: Communicator | None = None  # of these those of the first and the last stage; None on the others

    @staticmethod
    def split(mesh: Mesh, every: Communicator | None) -> "TrainingRanks":
        """The communicators of the axes, of that of all ranks. A collective call."""
        if every is None:
            return TrainingRanks(mesh)
        stages, ends = mesh.split(every, "pp"), None
        if stages is not None:
            ends = stages.split(color=0 if stages.rank in (0, stages.size - 1) else -1)
        data, tensor, replica = (mesh.split(every, *axes) for axes in (("dp",), ("tp",), ("pp", "tp")))
        return TrainingRanks(mesh, every, data, tensor, stages, replica, ends)

    @property
    def speaks(self) -> bool:
        """Whether this rank tells what all ranks of its stage know."""
        return self.mesh.index("tp") == 0

    @property
    def has_loss(self) -> bool:
        """Whether this rank tells the losses of its replica."""
        return self.speaks and self.mesh.index("pp") == self.mesh.size("pp") - 1

    def sum(self, *values: float) -> list[float]:
        """Each summed over all ranks, in their order. A collective call."""
        own = np.array(values, np.float64)
        if self.every is None:
            return own.tolist()
        return self.every.all_gather(own).reshape(self.every.size, -1).sum(axis=0).tolist()

    def sum_replicas(self, *values: float) -> list[float]:
        """Each summed over the replicas, of which the rank that has the loss counts. A collective call."""
        return self.sum(*(value if self.has_loss else 0.0 for value in values))

"""A cluster of identical hosts, for plans: the places of the ranks, and a World without processes."""

from dataclasses import dataclass
from typing import Any

from ckdist.comm.world import SingleWorld
from ckdist.errors import ConfigError
from ckdist.plan.cost import RankPlace
from ckdist.plan.machine_spec import MachineSpec

MAX_RANKS = 1 << 14


@dataclass(frozen=True)
class Cluster:
    """Identical hosts."""

    machine: MachineSpec
    hosts: int = 1
    cores: int = 0  # cores of a node that compute; 0: all
    ranks: int = 0  # ranks per host; 0: one per node

    def __post_init__(self) -> None:
        if not 1 <= self.hosts * self.local_size <= MAX_RANKS:
            raise ConfigError(
                f"{self.hosts} hosts with {self.local_size} ranks each are {self.hosts * self.local_size} ranks: "
                f"a plan has from 1 to {MAX_RANKS}"
            )

    @property
    def local_size(self) -> int:
        """Ranks of a host."""
        return self.ranks or self.machine.nodes

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.hosts * self.local_size

    @property
    def rank_memory(self) -> float:
        """Bytes of memory per rank."""
        return self.machine.total_memory / self.local_size

    def places(self) -> list[RankPlace]:
        """The places of all ranks, in order. The ranks of a host are consecutive."""
        nodes, size = self.machine.nodes, self.local_size
        threads = max(1, (self.cores or self.machine.cores) * nodes // size)
        return [
            RankPlace(f"host{host}", rank * nodes // size, threads)
            for host in range(self.hosts)
            for rank in range(size)
        ]


class PlannedWorld(SingleWorld):
    """The World of a cluster's ranks, as rank 0. In collective calls each rank has the value of this one."""

    def __init__(self, hosts: int, local_size: int) -> None:
        self.size, self.local_size = hosts * local_size, local_size
        self.hosts = tuple(f"host{host}" for host in range(hosts) for _ in range(local_size))

    def gather(self, value: Any) -> list[Any]:
        """Returns the value once per rank."""
        return [value] * self.size

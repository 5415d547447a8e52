"""Hosts that are alike, as a job would see them: the places of its ranks, one on each NUMA node, and a World that is
not started.
"""

from dataclasses import dataclass
from typing import Any

from ckdist.errors import ConfigError
from ckdist.planning.cost import LOCAL, RankPlace
from ckdist.planning.machine import MachineSpec

MAX_RANKS = 1 << 14


@dataclass(frozen=True)
class Cluster:
    """`hosts` hosts of one kind. `cores`: of a node that compute, 0: all; `ranks`: of a host, 0: one on each node."""

    machine: MachineSpec
    hosts: int = 1
    cores: int = 0
    ranks: int = 0

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
        """Ranks in all."""
        return self.hosts * self.local_size

    @property
    def rank_memory(self) -> float:
        """Bytes of one rank's share of its host."""
        return self.machine.total_memory / self.local_size

    def places(self) -> list[RankPlace]:
        """Of all ranks, in their order: neighbours are of one host."""
        machine, found = self.machine, []
        remote = {node: round(LOCAL * machine.remote) for node in range(machine.nodes)}
        threads = max(1, (self.cores or machine.cores) * machine.nodes // self.local_size)
        for host in range(self.hosts):
            for rank in range(self.local_size):
                node = rank * machine.nodes // self.local_size
                found.append(RankPlace(f"host{host}", node, node, threads, {**remote, node: LOCAL}))
        return found


class PlannedWorld:
    """The World that the ranks of a cluster would be, asked by rank 0; every rank says what this one says."""

    def __init__(self, hosts: int, local_size: int) -> None:
        self.rank, self.local_rank = 0, 0
        self.size, self.local_size = hosts * local_size, local_size
        self.hosts = tuple(f"host{host}" for host in range(hosts) for _ in range(local_size))

    def broadcast(self, value: Any = None) -> Any:
        """The value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The value, of every rank."""
        return [value] * self.size

    def collect(self, value: Any, seconds: float) -> list[Any]:  # noqa: ARG002
        """The value, of every rank, at once."""
        return self.gather(value)

    def close(self) -> None:
        """Nothing was opened."""


__all__ = ["Cluster", "PlannedWorld"]

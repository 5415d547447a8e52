"""The interface of a job's ranks under any launcher: `World`."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeGuard

Log: TypeAlias = Callable[[str], object]  # takes one line of text


class World(Protocol):
    """The ranks of a job and small messages between them at start-up (`ckdist.comm.world`).

    Values are msgpack-able. Every call but `close` raises CommError if a rank is lost.

    Attributes:
        rank: This rank, from 0.
        size: Number of ranks.
        local_rank: This rank among those of its host, from 0.
        local_size: Number of ranks on this host.
        hosts: The host of each rank. Ranks with the same name share memory.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]

    def broadcast(self, value: Any = None) -> Any:
        """Returns rank 0's value on every rank. A collective call."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, in rank order, on every rank. A collective call."""
        ...

    def collect(self, value: Any, seconds: float) -> list[Any] | None:
        """Returns every rank's value on rank 0, or None for a rank later than `seconds`. Other ranks get None."""
        ...

    def close(self) -> None:
        """Leaves the job. All ranks leave together."""
        ...


class MpiRanks(World, Protocol):
    """A World that MPI started.

    Attributes:
        mpi: The module mpi4py.MPI.
        comm: The mpi4py communicator of all ranks.
    """

    mpi: Any
    comm: Any


def has_mpi(world: World) -> TypeGuard[MpiRanks]:
    """True if MPI started this world."""
    return hasattr(world, "mpi")

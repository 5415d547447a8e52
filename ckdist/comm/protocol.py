"""What the parts of a job need of its ranks: a `World`, under any launcher."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeGuard

Log: TypeAlias = Callable[[str], object]  # takes one line of text


class World(Protocol):
    """The ranks of a job and small messages between them at start-up (`ckdist.comm.world`).

    Values are what msgpack takes. Every call but `close` raises CommError when a rank is lost.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def local_rank(self) -> int:
        """This rank among those of its host, from 0."""
        ...

    @property
    def local_size(self) -> int:
        """How many ranks this host has."""
        ...

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank, (size,); ranks with the same name share memory."""
        ...

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank. A collective call."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in rank order. A collective call."""
        ...

    def collect(self, value: Any, seconds: float) -> list[Any] | None:
        """On rank 0 every rank's value, None for a rank that is later than `seconds`; on the others None."""
        ...

    def close(self) -> None:
        """All ranks leave together."""
        ...


class MpiRanks(World, Protocol):
    """A World that MPI started."""

    @property
    def mpi(self) -> Any:
        """The module mpi4py.MPI."""
        ...

    @property
    def comm(self) -> Any:
        """The mpi4py communicator of all ranks."""
        ...


def has_mpi(world: World) -> TypeGuard[MpiRanks]:
    """Whether MPI started this world."""
    return hasattr(world, "mpi")

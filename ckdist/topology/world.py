"""What a world of `ckdist.comm` is to code that is given one: its ranks, and small messages between them."""

from collections.abc import Sequence
from typing import Any, Protocol


class World(Protocol):
    """The ranks of one job, as `ckdist.comm.world.start_world` makes them."""

    @property
    def rank(self) -> int:
        """This process's number, from 0 on."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host."""
        ...

    @property
    def hosts(self) -> Sequence[str]:
        """The host of every rank, by rank."""
        ...

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's msgpack-able value, on every rank; a collective call."""
        ...

    def gather(self, value: Any, /) -> list[Any]:
        """Every rank's msgpack-able value, on every rank, in rank order; a collective call."""
        ...

    def close(self) -> None:
        """All ranks leave together."""
        ...

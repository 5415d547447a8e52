"""Some ranks of a world, as a world of their own."""

from collections.abc import Sequence
from typing import Any

from ckdist.comm.protocol import World


class GroupWorld:
    """The ranks `ranks` of `world`, this one among them, counted from 0.

    All ranks of the world make the same calls, each in its own group: what one group gathers, all gather together.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self._world, self._ranks = world, tuple(ranks)
        self.rank, self.size = self._ranks.index(world.rank), len(self._ranks)
        self.hosts = tuple(world.hosts[r] for r in self._ranks)
        same = [r for r, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        self.local_rank, self.local_size = same.index(self.rank), len(same)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank of the group, in its order."""
        values = self._world.gather(value)
        return [values[r] for r in self._ranks]

    def broadcast(self, value: Any = None) -> Any:
        """The value of the group's first rank."""
        return self.gather(value)[0]

    def collect(self, value: Any, seconds: float) -> list[Any] | None:  # noqa: ARG002, a World's signature
        """On the group's first rank every rank's value; a rank that is lost is an error."""
        values = self.gather(value)
        return values if self.rank == 0 else None

    def close(self) -> None:
        """The world is not this group's to leave."""

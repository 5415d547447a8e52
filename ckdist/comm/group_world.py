"""Some ranks of a world, as a world of their own."""

from collections.abc import Sequence
from typing import Any

from ckdist.comm.world_protocol import World


class GroupWorld:
    """The given ranks of a world, renumbered from 0. This rank is one of them.

    All ranks of the world make the same calls, each in its own group, because every call is a gather over the whole
    world.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self._world, self._ranks = world, tuple(ranks)
        self.rank, self.size = self._ranks.index(world.rank), len(self._ranks)
        self.hosts = tuple(world.hosts[r] for r in self._ranks)
        same = [r for r, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        self.local_rank, self.local_size = same.index(self.rank), len(same)

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of the group's ranks, in its order."""
        values = self._world.gather(value)
        return [values[r] for r in self._ranks]

    def broadcast(self, value: Any = None) -> Any:
        """Returns the value of the group's first rank."""
        return self.gather(value)[0]

    def collect(self, value: Any, seconds: float) -> list[Any] | None:  # noqa: ARG002, a World's signature
        """Returns the values of the group's ranks on its first rank, else None. Raises CommError if a rank is lost."""
        values = self.gather(value)
        return values if self.rank == 0 else None

    def close(self) -> None:
        """Does nothing: the world's owner closes it."""

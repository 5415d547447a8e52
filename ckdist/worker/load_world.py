"""A World for a load that one rank may fail alone: then it fails on all ranks, and the job goes on."""

from typing import Any

from ckdist.comm.host_name import rank_on_host
from ckdist.comm.world_protocol import World
from ckdist.errors import ConfigError


class LoadWorld:
    """The ranks of `world` during one load. Each call also carries the error of a rank that has failed.

    A rank that fails calls `fail` once in place of its next call.
    """

    def __init__(self, world: World) -> None:
        self._world, self._failed = world, False
        self.rank, self.size, self.hosts = world.rank, world.size, world.hosts
        self.local_rank, self.local_size = world.local_rank, world.local_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)  # what a launcher adds to a World

    def broadcast(self, value: Any = None) -> Any:
        """Returns rank 0's value on every rank. Raises ConfigError if a rank has failed."""
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's value, in rank order. Raises ConfigError if a rank has failed."""
        return self._gather("", value)

    def collect(self, value: Any, seconds: float) -> list[Any] | None:
        """As `World.collect`. It does not carry errors."""
        return self._world.collect(value, seconds)

    def close(self) -> None:
        """Nothing: the job uses its World further on."""

    def fail(self, error: Exception) -> str:
        """Ends the load on every rank. Returns the reason."""
        if not self._failed:
            try:
                self._gather(str(error) or repr(error), None)
            except ConfigError as first:
                return str(first)
        return str(error) or repr(error)

    def _gather(self, text: str, value: Any) -> list[Any]:
        rows = self._world.gather([text, value])
        for rank, (reason, _) in enumerate(rows):
            if reason:
                self._failed = True
                raise ConfigError(f"{rank_on_host(self, rank)}: {reason}")
        return [value for _, value in rows]

"""How the processes of a job find each other: ranks, hosts, and small messages at start-up.

Ranks that `ckdist launch` started have inherited their connections (`launched_world`). Under an MPI launcher mpi4py
connects them. Otherwise RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do (`tcp_world`). Without these the world has one
rank. Messages are msgpack, never pickle. The traffic of every step goes through a native communicator
(`ckdist.comm.communicator`) instead.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ckdist.comm.bootstrap.launchers import CONNECTIONS_VARIABLE, MPI_VARIABLES, is_rank
from ckdist.comm.host_name import rank_on_host
from ckdist.comm.world_protocol import World
from ckdist.ended_threads import raise_priorities
from ckdist.errors import CkdistError, CommError, ConfigError, UserError

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class SingleWorld:
    """A world of one rank, without a launcher."""

    rank, size, local_rank, local_size = 0, 1, 0, 1
    hosts = (socket.gethostname(),)

    def broadcast(self, value: Any = None) -> Any:
        """Returns `value`."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Returns [value]."""
        return [value]

    def collect(self, value: Any, seconds: float) -> list[Any]:  # noqa: ARG002, a World's signature
        """Returns [value]."""
        return [value]

    def close(self) -> None:
        """Does nothing."""


def start_world(encrypt: str = "auto") -> World:
    """Returns the world that this process was started in. `encrypt`: the value of `--encrypt`.

    Connections of ckdist's own launcher come first. An MPI launcher comes before RANK and its companions: it may set
    these too.
    """
    if os.environ.get(CONNECTIONS_VARIABLE):
        from ckdist.comm.bootstrap.launched_world import LaunchedWorld

        return LaunchedWorld(encrypt)
    if not any(name in os.environ for name in MPI_VARIABLES):
        if not is_rank():
            return SingleWorld()
        from ckdist.comm.bootstrap.tcp_world import TcpWorld, is_started

        return TcpWorld.from_environment(log=log.warning, encrypt=encrypt) if is_started() else SingleWorld()
    try:
        from ckdist.comm.mpi_world import MpiWorld

        return MpiWorld(encrypt)
    except ImportError as error:
        raise ConfigError(
            f"started by an MPI launcher, but mpi4py does not load ({error}): pip install 'ckdist[mpi]'"
        ) from None


def together(world: World, action: Callable[[], Result]) -> Result:
    """Runs `action` on every rank and returns its result if it succeeded on all of them.

    Otherwise every rank raises: its own error, or that of the first rank that failed.
    """
    try:
        result = action()
    except CkdistError as error:
        world.gather([str(error), isinstance(error, UserError)])
        raise
    for rank, (text, user) in enumerate(world.gather([None, False])):
        if text:
            raise (ConfigError if user else CommError)(f"{rank_on_host(world, rank)}: {text}")
    return result


def leave(code: int) -> NoReturn:
    """Ends this process at once after a failure. It waits for nothing, because peers may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    raise_priorities(os.getpid())
    os._exit(code)

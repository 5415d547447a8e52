"""The ranks of a job that ckdist itself started (`ckdist.launcher`).

Each rank has inherited the socket that connects it to rank 0, directly or through a relay to rank 0's host. Nothing
listens, and only ranks of the job hold an end, so no secret is needed. CKDIST_CONNECTIONS names the sockets by
descriptor and inode. The inode does not match in a process that did not inherit them.
"""

import contextlib
import os
import socket
from collections.abc import Mapping

from ckdist.comm.bootstrap.connection import BootstrapConnection
from ckdist.comm.bootstrap.launchers import CONNECTIONS_VARIABLE
from ckdist.comm.bootstrap.star_world import StarWorld, start_seconds
from ckdist.errors import ConfigError


def describe(descriptors: Mapping[int, int]) -> str:
    """The value of CKDIST_CONNECTIONS for a rank that inherits `descriptors`: peer rank -> descriptor."""
    return ",".join(f"{peer}={fd}:{os.fstat(fd).st_ino}" for peer, fd in descriptors.items())


def inherited(text: str) -> dict[int, socket.socket]:
    """The sockets that `text` describes, by peer rank. Raises ConfigError if this process does not have one."""
    found: dict[int, socket.socket] = {}
    for part in text.split(","):
        with contextlib.suppress(ValueError, OSError):
            peer, _, place = part.partition("=")
            fd, _, inode = place.partition(":")
            if os.fstat(int(fd)).st_ino == int(inode):
                os.set_inheritable(int(fd), False)
                found[int(peer)] = socket.socket(fileno=int(fd))
                continue
        raise ConfigError(
            f"{CONNECTIONS_VARIABLE} ({part}) names no connection of this process: a rank starts its world once, and "
            "processes that it starts must not inherit the variable"
        )
    return found


class LaunchedWorld(StarWorld):
    """A job's ranks over inherited connections.

    The constructor is a collective call and raises ConfigError if the environment is not a rank's.
    """

    def __init__(self, encrypt: str = "auto") -> None:
        sockets = inherited(os.environ[CONNECTIONS_VARIABLE])
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if sorted(sockets) != (list(range(1, size)) if rank == 0 else [0]):
            raise ConfigError(f"rank {rank} of {size} has connections to ranks {', '.join(map(str, sorted(sockets)))}")
        super().__init__(rank, size, None, encrypt)
        patience = start_seconds()  # the others may still be starting
        self._connections = {peer: BootstrapConnection(peer, sockets[peer], quiet=patience) for peer in sorted(sockets)}
        self.find_hosts()

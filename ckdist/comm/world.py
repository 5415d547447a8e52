"""How the processes of a job find each other: ranks, hosts, and small messages at start-up.

Ranks that `ckdist launch` started have inherited their connections (`launched_world`). Under an MPI launcher mpi4py
connects them. Otherwise RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do (`tcp_world`). Without these the world has one
rank. Messages are msgpack, never pickle. The traffic of every step goes through a native communicator
(`ckdist.comm.communicator`) instead.
"""

import contextlib
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgpack
import numpy as np

from ckdist.comm.bootstrap import tcp_world
from ckdist.comm.bootstrap.connection import HEARTBEAT_SECONDS, BootstrapConnection
from ckdist.comm.bootstrap.handshake import SECRET_VARIABLE, read_secret
from ckdist.comm.bootstrap.launched_world import LaunchedWorld, is_launched
from ckdist.comm.bootstrap.launchers import MPI_VARIABLES
from ckdist.comm.bootstrap.sockets import connect_ranks
from ckdist.comm.bootstrap.star_world import packed
from ckdist.comm.host_name import host_name, machine_name
from ckdist.comm.world_protocol import World
from ckdist.errors import CkdistError, CommError, ConfigError, UserError

log = logging.getLogger(__name__)

WATCH_SECONDS = 10.0  # to open the heartbeat connections of an MPI job
COLLECT_TAG = 77

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


class MpiWorld:
    """The ranks of an MPI job. The constructor is a collective call and raises ImportError if mpi4py does not load."""

    def __init__(self) -> None:
        import mpi4py

        # A rank that fails must be able to end while its peers are gone. So only close() finalises MPI.
        mpi4py.rc.finalize = False
        _leave_tcp_alone()
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self._connections: list[BootstrapConnection] = []
        self.hosts = tuple(self.gather_all(host_name()))
        same = [r for r, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        self.local_rank, self.local_size = same.index(self.rank), len(same)
        self.secret = self._secret()
        self._watch()

    def _secret(self) -> bytes | None:
        """The job's secret if every rank has one, None if no rank has. Raises ConfigError if only some have."""
        own = read_secret() if os.environ.get(SECRET_VARIABLE) else None
        is_given = self.gather_all(own is not None)
        if any(is_given) and not all(is_given):
            raise ConfigError(
                f"{SECRET_VARIABLE} is set on rank {is_given.index(True)} and not on rank {is_given.index(False)}: "
                f"name the secret on every rank (mpirun -x {SECRET_VARIABLE}), or on none"
            )
        return own

    def _watch(self) -> None:
        """Opens connections for heartbeats while ranks load: MPI reports dead ranks, but not stopped ones."""
        sockets: list[socket.socket | None] = []
        problem = None
        try:
            sockets = [
                socket.socket(fileno=fd) if fd >= 0 else None
                for fd in connect_ranks(self, os.environ.get(tcp_world.INTERFACE_VARIABLE), 0, seconds=WATCH_SECONDS)
            ]
        except CkdistError as error:
            problem = str(error)
        if problems := [p for p in self.gather_all(problem) if p]:
            for connection in filter(None, sockets):
                connection.close()
            if self.rank == 0:
                log.warning("a rank that is stopped while it loads will not be noticed: %s", problems[0])
            return
        self._connections = [
            BootstrapConnection(peer, connection) for peer, connection in enumerate(sockets) if connection
        ]

    def broadcast(self, value: Any = None) -> Any:
        """Returns rank 0's msgpack-able value on every rank."""
        data = np.frombuffer(packed(value), np.uint8) if self.rank == 0 else None
        size = np.array([0 if data is None else data.size], np.int64)
        self._complete(self.comm.Ibcast(size))
        buffer = np.empty(int(size[0]), np.uint8) if data is None else data.copy()
        self._complete(self.comm.Ibcast(buffer))
        return msgpack.unpackb(buffer.tobytes(), strict_map_key=False)

    def gather_all(self, value: Any) -> list[Any]:
        """Returns every rank's msgpack-able value, in rank order, on every rank."""
        data = np.frombuffer(packed(value), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self._complete(self.comm.Iallgather(np.array([data.size], np.int64), sizes))
        joined = np.empty(int(sizes.sum()), np.uint8)
        self._complete(self.comm.Iallgatherv(data, [joined, sizes.astype(np.int32)]))
        ends = np.cumsum(sizes)
        return [
            msgpack.unpackb(joined[e - s : e].tobytes(), strict_map_key=False) for s, e in zip(sizes, ends, strict=True)
        ]

    gather = gather_all

    def collect(self, value: Any, seconds: float) -> list[Any] | None:
        """Returns every rank's value on rank 0, or None for a rank later than `seconds`. Other ranks get None."""
        deadline = time.monotonic() + seconds
        if self.rank:
            # MPI may still read the buffer after the deadline.
            self._collected = np.frombuffer(packed(value), np.uint8)
            with contextlib.suppress(CommError):  # the job ends anyway
                self._complete(self.comm.Isend(self._collected, 0, COLLECT_TAG), deadline)
            return None
        values, missing, status = [value] + [None] * (self.size - 1), set(range(1, self.size)), self.mpi.Status()
        under_way = self._collected = {}  # rank: its request and buffer
        while missing and time.monotonic() < deadline:
            for rank in list(missing):
                if rank in under_way:
                    request, buffer = under_way[rank]
                    if request.Test():
                        values[rank] = msgpack.unpackb(buffer.tobytes())
                        missing.remove(rank)
                elif self.comm.Iprobe(rank, COLLECT_TAG, status):
                    buffer = np.empty(status.Get_count(), np.uint8)
                    under_way[rank] = self.comm.Irecv(buffer, rank, COLLECT_TAG), buffer
            time.sleep(0 if missing & under_way.keys() else 1e-3)
        return values

    def close(self) -> None:
        """Leaves the job. All ranks leave together."""
        self.mpi.Finalize()
        for connection in self._connections:
            connection.close()

    def _complete(self, request: Any, deadline: float = math.inf) -> bool:
        """Waits for a request and returns True, or False at the deadline.

        It sleeps between polls: ranks of this host that still load need the cores.
        """
        pause, look = 0.0, time.monotonic() + HEARTBEAT_SECONDS
        while not request.Test():
            time.sleep(pause)
            pause = min(pause + 1e-5, 2e-3)
            now = time.monotonic()
            if now > deadline:
                return False
            if self._connections and now > look:
                look = now + HEARTBEAT_SECONDS
                for connection in self._connections:
                    connection.check()
        return True


def _leave_tcp_alone() -> None:
    """Disables TCP in Open MPI if all ranks share one host: it would listen on all addresses.

    A setting of the user's own stays.
    """
    size = os.environ.get("OMPI_COMM_WORLD_SIZE")
    if size is not None and size == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        os.environ.setdefault("OMPI_MCA_btl", "^tcp")


def start_world() -> World:
    """Returns the world that this process was started in.

    Connections of ckdist's own launcher come first. An MPI launcher comes before RANK and its companions: it may set
    these too.
    """
    if is_launched():
        return LaunchedWorld()
    if not any(name in os.environ for name in MPI_VARIABLES):
        return tcp_world.TcpWorld.from_environment(log=log.warning) if tcp_world.is_started() else SingleWorld()
    try:
        return MpiWorld()
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
            where = f"rank {rank} ({machine_name(world.hosts[rank])})"
            raise (ConfigError if user else CommError)(f"{where}: {text}")
    return result


def leave(code: int) -> NoReturn:
    """Ends this process at once after a failure. It waits for nothing, because peers may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

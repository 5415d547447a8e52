"""The world of an MPI job. MPI carries its messages, and further connections its heartbeats."""

import contextlib
import logging
import math
import os
import socket
import time
from typing import Any

import msgpack
import numpy as np

from ckdist.comm.bootstrap.connection import HEARTBEAT_SECONDS, BootstrapConnection
from ckdist.comm.bootstrap.handshake import SECRET_VARIABLE, job_secret, read_secret
from ckdist.comm.bootstrap.sealed_messages import KEYS
from ckdist.comm.bootstrap.sockets import HEARTBEATS, connect_ranks
from ckdist.comm.bootstrap.star_world import packed
from ckdist.comm.bootstrap.tcp_world import INTERFACE_VARIABLE
from ckdist.comm.host_name import host_name
from ckdist.errors import CkdistError, CommError, ConfigError

log = logging.getLogger(__name__)

WATCH_SECONDS = 10.0  # to open the heartbeat connections
COLLECT_TAG = 77


class MpiWorld:
    """The ranks of an MPI job. The constructor is a collective call and raises ImportError if mpi4py does not load."""

    def __init__(self, encrypt: str = "auto") -> None:
        import mpi4py

        # A rank that fails must be able to end while its peers are gone. So only close() finalises MPI.
        mpi4py.rc.finalize = False
        _leave_network_alone()
        from mpi4py import MPI

        self.mpi, self.comm, self.encrypt = MPI, MPI.COMM_WORLD, encrypt
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self._connections: list[BootstrapConnection] = []
        self.hosts = tuple(self.gather(host_name()))
        same = [r for r, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        self.local_rank, self.local_size = same.index(self.rank), len(same)
        self.secret = self._secret() or (job_secret(self) if len(set(self.hosts)) > 1 else None)
        self._watch()

    def _secret(self) -> bytes | None:
        """The job's secret if every rank has one, None if no rank has. Raises ConfigError if only some have."""
        own = read_secret() if os.environ.get(SECRET_VARIABLE) else None
        is_given = self.gather(own is not None)
        if any(is_given) and not all(is_given):
            raise ConfigError(
                f"{SECRET_VARIABLE} is set on rank {is_given.index(True)} and not on rank {is_given.index(False)}: "
                f"name the secret on every rank (mpirun -x {SECRET_VARIABLE}), or on none"
            )
        return own

    def _watch(self) -> None:
        """Opens connections for heartbeats while ranks load: MPI reports dead ranks, but not stopped ones."""
        sockets: list[socket.socket | None] = []
        problem, keys = None, b""
        try:
            interface = os.environ.get(INTERFACE_VARIABLE)
            ((files, keys),) = connect_ranks(self, interface, [HEARTBEATS], seconds=WATCH_SECONDS)
            sockets = [socket.socket(fileno=fd) if fd >= 0 else None for fd in files]
        except CkdistError as error:
            problem = str(error)
        if problems := [p for p in self.gather(problem) if p]:
            for connection in filter(None, sockets):
                connection.close()
            if self.rank == 0:
                log.warning("a rank that is stopped while it loads will not be noticed: %s", problems[0])
            return
        self._connections = [
            BootstrapConnection(peer, connection, keys=keys[KEYS * peer : KEYS * (peer + 1)])
            for peer, connection in enumerate(sockets)
            if connection
        ]

    def broadcast(self, value: Any = None) -> Any:
        """Returns rank 0's msgpack-able value on every rank."""
        data = np.frombuffer(packed(value), np.uint8) if self.rank == 0 else None
        size = np.array([0 if data is None else data.size], np.int64)
        self._complete(self.comm.Ibcast(size))
        buffer = np.empty(int(size[0]), np.uint8) if data is None else data.copy()
        self._complete(self.comm.Ibcast(buffer))
        return msgpack.unpackb(buffer.tobytes(), strict_map_key=False)

    def gather(self, value: Any) -> list[Any]:
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


def _leave_network_alone() -> None:
    """Disables TCP and libfabric in Open MPI if all ranks share one host.

    TCP would listen on all addresses. Starting libfabric costs each rank 50 ms of CPU time. A setting of the user's own
    stays.
    """
    size = os.environ.get("OMPI_COMM_WORLD_SIZE")
    if size is not None and size == os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        os.environ.setdefault("OMPI_MCA_btl", "^tcp,ofi")
        os.environ.setdefault("OMPI_MCA_pml", "^cm")

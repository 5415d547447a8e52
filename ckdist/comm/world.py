"""How the processes of one job find each other: who this rank is, who shares its host, and small messages at start-up.

mpi4py starts the world under any MPI launcher; without a launcher the world has one rank. What is exchanged here is
msgpack, never pickle. The traffic of every step goes through a native group (`open_group`), not through this.
"""

import ctypes
import os
import pathlib
import socket
import sys
import time
from dataclasses import dataclass

import msgpack
import numpy as np

from ckdist import native
from ckdist.errors import CommError, ConfigError

# Set by the launchers of Open MPI, MPICH and Intel MPI, and by Slurm's and others' PMIx.
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS")


class SingleWorld:
    """One rank, no launcher."""

    rank, size, local_rank, local_size = 0, 1, 0, 1
    hosts = (socket.gethostname(),)

    def broadcast(self, value=None):
        return value

    def gather(self, value):
        return [value]

    def close(self) -> None:
        pass


class MpiWorld:
    """The ranks of an MPI job."""

    def __init__(self):
        import mpi4py

        # A rank that fails must be able to end while its peers are gone: finalising is done by close(), on the good path alone.
        mpi4py.rc.finalize = False
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.hosts = tuple(self.gather_all(_host_name()))
        same = [r for r, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        self.local_rank, self.local_size = same.index(self.rank), len(same)

    def broadcast(self, value=None):
        """Rank 0's msgpack-able value, on every rank."""
        data = np.frombuffer(msgpack.packb(value), np.uint8) if self.rank == 0 else None
        size = np.array([0 if data is None else data.size], np.int64)
        _complete(self.comm.Ibcast(size))
        buffer = np.empty(int(size[0]), np.uint8) if data is None else data.copy()
        _complete(self.comm.Ibcast(buffer))
        return msgpack.unpackb(buffer.tobytes(), strict_map_key=False)

    def gather_all(self, value) -> list:
        """Every rank's msgpack-able value, on every rank, in rank order."""
        data = np.frombuffer(msgpack.packb(value), np.uint8)
        sizes = np.empty(self.size, np.int64)
        _complete(self.comm.Iallgather(np.array([data.size], np.int64), sizes))
        joined = np.empty(int(sizes.sum()), np.uint8)
        _complete(self.comm.Iallgatherv(data, [joined, sizes.astype(np.int32)]))
        ends = np.cumsum(sizes)
        return [msgpack.unpackb(joined[e - s : e].tobytes(), strict_map_key=False) for s, e in zip(sizes, ends)]

    gather = gather_all

    def close(self) -> None:
        """All ranks leave together."""
        self.mpi.Finalize()


def _complete(request) -> None:
    """Waits for a collective call without taking the core from a rank of this host that still has work, such as loading."""
    pause = 0.0
    while not request.Test():
        time.sleep(pause)
        pause = min(pause + 1e-5, 2e-3)


def _host_name() -> str:
    """Ranks with the same name can share memory.

    The name of the machine alone does not tell: two machines may have the same, so it is joined by the boot, and by the
    process namespace, because memory is found through /proc.
    """
    parts = [socket.gethostname()]
    for what in (lambda: pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()[:8], lambda: os.readlink("/proc/self/ns/pid")):
        try:
            parts.append(what())
        except OSError:
            pass
    return "/".join(parts)


def start_world():
    """The world this process was started in."""
    if not any(name in os.environ for name in LAUNCHER_VARIABLES):
        return SingleWorld()
    try:
        return MpiWorld()
    except ImportError as error:
        raise ConfigError(f"started by an MPI launcher, but mpi4py does not load ({error}): pip install 'ckdist[mpi]'") from None


def agree(world, what: str, value: str) -> None:
    """CommError on every rank unless all have the same `value`."""
    values = world.gather(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise CommError(f"rank {rank} has a different {what} ({other[:16]}) than rank 0 ({values[0][:16]}): start all ranks with the same model, flags and version")


@dataclass(frozen=True)
class Group:
    """A native group: how a replay meets the other ranks. `kind` is shared-memory or mpi."""

    kind: str
    handle: object

    def check_peers(self) -> None:
        """CommError when a peer is known to be dead, or silent for longer than the timeout; for a rank between steps."""
        native.check(native.lib.ckdist_group_check_peers(self.handle))


def open_group(world, spins: int, timeout: float, transport: str = "auto") -> Group:
    """The group for a world: shared memory where all ranks are on one host, else MPI; "mpi" demands MPI.

    `spins`: polls of a flag before a waiting thread sleeps. `timeout`: seconds that any wait for a peer may take.
    """
    out = native.ffi.new("struct ckdist_group **")
    world.gather(None)  # ranks load for different times; from here on the timeout counts
    if world.local_size == world.size and transport == "auto":
        path = native.ffi.NULL
        if world.rank == 0:
            native.check(native.lib.ckdist_host_group(path, 0, world.size, spins, timeout, out))
            world.broadcast(native.ffi.string(native.lib.ckdist_group_path(out[0])).decode())
        else:
            path = native.ffi.new("char[]", world.broadcast().encode())
            native.check(native.lib.ckdist_host_group(path, world.rank, world.size, spins, timeout, out))
        kind = "shared-memory"
    else:
        kind = "mpi"
        _open_mpi(world, spins, timeout, out)
    return Group(kind, native.ffi.gc(out[0], native.lib.ckdist_group_free))


def _open_mpi(world, spins: int, timeout: float, out) -> None:
    """Hands the addresses of MPI's own calls, and handles by value, to the native side."""
    if not isinstance(world, MpiWorld):
        raise ConfigError("transport mpi was demanded, but no MPI launcher started this process: use mpirun")
    if world.mpi.Query_thread() < world.mpi.THREAD_MULTIPLE:
        raise ConfigError(f"this MPI allows thread level {world.mpi.Query_thread()}, and {world.mpi.THREAD_MULTIPLE} (MPI_THREAD_MULTIPLE) is needed between hosts: use a build of MPI with it")
    library = ctypes.CDLL(world.mpi.__file__)  # finds the MPI library that mpi4py itself is linked to
    address = lambda name: native.ffi.cast("void *", ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    comm = world.comm.Dup()
    handle = lambda value: native.ffi.cast("void *", value.handle)
    calls = [address(name) for name in ("MPI_Isend", "MPI_Irecv", "MPI_Test")]
    native.check(native.lib.ckdist_mpi_group(*calls, handle(world.mpi.BYTE), handle(comm), world.rank, world.size, spins, timeout, out))


def leave(code: int) -> None:
    """Ends this process at once after a failure: peers may be gone, so nothing may wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

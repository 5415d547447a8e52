"""Opens the native transports between ranks: tcp, mpi and verbs."""

import ctypes
from collections.abc import Callable
from typing import Any

from ckdist import native
from ckdist.comm.bootstrap.handshake import Listener
from ckdist.comm.bootstrap.sockets import DATA, HEARTBEATS, connect_ranks
from ckdist.comm.host_name import machine_name
from ckdist.comm.world_protocol import Log, MpiRanks, World, has_mpi
from ckdist.errors import ConfigError
from ckdist.native import CData

lib = native.lib


def open_transport(world: World, transport: str, interface: str | None, timeout: float, log: Log | None) -> CData:
    """Opens a native ckdist_transport between all ranks. A collective call; raises ConfigError or CommError."""
    if transport == "verbs":
        from ckdist.comm.transports.verbs import open_verbs

        opened = open_verbs(world, interface, timeout)
    elif transport == "mpi":
        assert has_mpi(world)
        opened = _open_mpi(world, timeout)
    else:
        opened = _open_tcp(world, interface, timeout, log)
    if len(set(world.hosts)) > 1:
        native.call(lib.ckdist_transport_name_hosts, opened, [machine_name(host) for host in world.hosts])
    return opened


def _open_tcp(world: World, interface: str | None, timeout: float, log: Log | None) -> CData:
    kept = list[tuple[Listener, list[Any]]]()
    data, heartbeats = connect_ranks(
        world, interface, (DATA, HEARTBEATS), log, keep=lambda *listening: kept.append(listening)
    )
    keys = data.keys + heartbeats.keys or None
    descriptors = data.descriptors, heartbeats.descriptors
    transport = native.new(lib.ckdist_transport_tcp, world.rank, world.size, *descriptors, keys, timeout)
    for listener, addresses in kept:
        from ckdist.comm.transports.reconnection import Reconnection

        Reconnection(world, transport, listener, addresses, timeout)
    return transport


def before_mpi_ends(world: MpiRanks, action: Callable[[], object]) -> None:
    """Makes MPI_Finalize run `action` first, from any caller: no thread may be in a call of MPI then."""
    world.mpi.COMM_SELF.Set_attr(world.mpi.Comm.Create_keyval(delete_fn=lambda *_: action()), None)


def _open_mpi(world: MpiRanks, timeout: float) -> CData:
    """Raises ConfigError if this MPI does not allow calls from several threads."""
    if world.mpi.Query_thread() < world.mpi.THREAD_MULTIPLE:
        raise ConfigError(
            f"this MPI allows thread level {world.mpi.Query_thread()}, and {world.mpi.THREAD_MULTIPLE} "
            "(MPI_THREAD_MULTIPLE) is needed, for heartbeats are sent from a thread: use a build of MPI with it"
        )
    library = ctypes.CDLL(world.mpi.__file__)  # finds the MPI library that mpi4py itself is linked to
    calls = [
        ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        for name in ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Iprobe", "MPI_Get_count")
    ]
    comm = world.comm.Dup()
    kinds = [world.mpi.BYTE.handle, comm.handle]
    return native.new(lib.ckdist_transport_mpi, *calls, *kinds, world.rank, world.size, timeout)

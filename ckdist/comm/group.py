"""The native group of a job's ranks: how a replay meets the other ranks, in shared memory and over a wire."""

import logging
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckdist import native
from ckdist.comm.protocol import World, has_mpi
from ckdist.comm.thresholds import Thresholds, load_thresholds
from ckdist.comm.transport import before_mpi_ends
from ckdist.comm.wires import open_wire
from ckdist.native import CData

log = logging.getLogger(__name__)
lib, ffi = native.lib, native.ffi


@dataclass(frozen=True)
class Group:
    """A native group. `kind` says what joins the ranks: shared memory, a wire's name, or both."""

    kind: str
    handle: CData

    def check_peers(self) -> None:
        """CommError when a peer is known to be dead, or silent for longer than the timeout; for a rank between
        steps.
        """
        native.check(lib.ckdist_group_check_peers(self.handle))


def open_group(world: World, spins: int, timeout: float, transport: str = "auto") -> Group:
    """The group of all ranks of a world; a collective call.

    `auto`: shared memory inside each host, and between hosts the wire that measures fastest. A transport that is named
    is used between hosts; on a single host it is used instead of shared memory. `spins`: polls of a flag before a
    waiting thread sleeps. `timeout`: seconds that any wait for a peer may take. Raises ConfigError or CommError on
    every rank alike.
    """
    world.gather(None)  # ranks load for different times; from here on the timeout counts
    one_host = len(set(world.hosts)) == 1
    if world.size == 1 or (one_host and transport == "auto"):
        handle = _met(
            world,
            world.hosts,
            lambda path, out: lib.ckdist_host_group(path, world.rank, world.size, spins, timeout, out),
        )
        return Group("shared memory", handle)
    wire = open_wire(world, transport, timeout)
    if world.rank == 0:
        log.debug("%s", wire.reason)
    hosts = range(world.size) if one_host else world.hosts  # on one host the wire alone
    host_of = [list(hosts).index(host) for host in hosts]
    limits = Thresholds(*world.broadcast(list(load_thresholds())))
    sizes = limits.wire_direct_bytes, limits.leaders_bytes
    handle = _met(
        world,
        hosts,
        lambda path, out: lib.ckdist_wire_group(
            wire.handle, path, world.rank, world.size, host_of, *sizes, spins, timeout, out
        ),
    )
    if wire.name == "mpi" and has_mpi(world):
        held = weakref.ref(handle)
        before_mpi_ends(world, lambda: held() and lib.ckdist_group_leave(held()))
    return Group(f"shared memory and {wire.name}" if len(set(hosts)) < world.size else wire.name, handle)


def _met(world: World, hosts: Iterable[object], make: Callable[[CData, CData], int]) -> CData:
    """Makes this rank's handle: a host's first rank before the others, which get its memory's path."""
    hosts = list(hosts)
    first = hosts.index(hosts[world.rank])
    out, paths = ffi.new("struct ckdist_group **"), None
    if world.rank == first:
        native.check(make(ffi.NULL, out))
    paths = world.gather(ffi.string(lib.ckdist_group_path(out[0])).decode() if world.rank == first else None)
    if world.rank != first:
        native.check(make(ffi.new("char[]", paths[first].encode()), out))
    return ffi.gc(out[0], lib.ckdist_group_free)

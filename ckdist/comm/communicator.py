"""Collectives, messages and one-sided windows between the ranks of a job, on numpy arrays.

They are the operations of MPI and NCCL, and native code has the same ones. bfloat16 travels in arrays of uint16 with
dtype="bfloat16". Reductions give the same bits on every transport and in every run (native/comm/algorithms/order.h).
Peers on the same host read arrays from `allocate` in place.

Every wait ends within `timeout` seconds. If a rank dies, gives up or stalls, calls raise a CommError that names it, and
so does every later call on the communicator. Heartbeats run between calls too, so a loss is known before the next call
(`check_peers`).
"""

import logging
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from ckdist import native
from ckdist.comm.collective_calls import Collectives, NativeCall, check_array
from ckdist.comm.operation import Operation
from ckdist.comm.thresholds import Thresholds, load_thresholds
from ckdist.comm.transports.names import CHOICES
from ckdist.comm.world_protocol import Log, World, has_mpi
from ckdist.errors import ConfigError
from ckdist.native import CData

if TYPE_CHECKING:
    from ckdist.comm.transports.transport_choice import ChosenTransport
    from ckdist.comm.window import Window

ARENA_BYTES = 4 << 30  # address space; memory is used as it is allocated
CHUNK_BYTES, CHUNK_SECONDS = 512 << 10, 4e-3  # minima of a chunk of a sum between hosts: its size, its time on the link
_PATIENT_POLLS, _CROWDED_POLLS = 20000, 50

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

ffi, lib = native.ffi, native.lib


class Family:
    """The communicators that were split from the same one. They share a transport.

    Attributes:
        exposed: Arrays that peers may write. They stay alive as long as the transport.
        exchanges: Seconds of exchanges of 16 KiB and of 1 MiB between hosts, or empty.
    """

    def __init__(self, exchanges: list[float]) -> None:
        self.exchanges = exchanges
        self.members: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self.exposed: list[np.ndarray] = []


class Communicator(Collectives[np.ndarray, None]):
    """Ranks 0 to size - 1 and this rank among them. Made by `open_communicator` or `split`.

    All ranks make the same collective calls in the same order. These block; those of `start` return an Operation at
    once.

    Args:
        handle: A native ckdist_communicator, which this object owns.
        family: The communicators of the same transport.
    """

    def __init__(self, handle: CData, family: "Family") -> None:
        self.handle, self._family, self.exchanges = handle, family, family.exchanges
        family.members.add(self)
        self.under_way: set[Operation[Any]] = set()  # operations add and remove themselves
        self._windows = 0
        self.rank, self.size = lib.ckdist_communicator_rank(handle), lib.ckdist_communicator_size(handle)
        self.transport = ffi.string(lib.ckdist_communicator_transport(handle)).decode()

    @property
    def start(self) -> "StartedCollectives":
        """The collectives that return an Operation at once: `start.all_reduce(x).wait()` equals `all_reduce(x)`."""
        return StartedCollectives(self)

    def allocate(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> np.ndarray:
        """Returns zeros in this rank's shared arena. bfloat16 gives an array of uint16."""
        kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        handle = self.handle
        place = native.call(lib.ckdist_communicator_allocate, handle, max(size, 1))
        if place is None:
            return np.zeros(shape, kind)  # no rank reads it in place
        place = ffi.gc(place, lambda p: lib.ckdist_communicator_release(handle, p))
        return np.frombuffer(ffi.buffer(place, max(size, 1)), np.uint8)[:size].view(kind).reshape(shape)

    def send(self, x: np.ndarray, rank: int, tag: int = 0) -> None:
        """Sends x to `rank` and returns when x may change. `tag`: 0 to 1023."""
        self.isend(x, rank, tag).wait()

    def recv(self, x: np.ndarray, rank: int, tag: int = 0) -> np.ndarray:
        """Receives a message of exactly x's size from `rank` into x, and returns x."""
        return self.irecv(x, rank, tag).wait()

    def isend(self, x: np.ndarray, rank: int, tag: int = 0) -> Operation[None]:
        """Starts to send x, which must not change until the operation is complete. `tag`: 0 to 1023."""
        return self.begin(
            lambda out: lib.ckdist_isend(self.handle, rank, tag, native.pointer(x), x.nbytes, out), None, x
        )

    def irecv(self, x: np.ndarray, rank: int, tag: int = 0) -> Operation[np.ndarray]:
        """Starts to receive a message of exactly x's size. Messages of one rank and tag keep their order."""
        check_array(x, x.size, x.dtype, "x")
        return self.begin(lambda out: lib.ckdist_irecv(self.handle, rank, tag, native.pointer(x), x.nbytes, out), x)

    def window(self, array: np.ndarray) -> "Window":
        """Makes `array` accessible to all ranks. A collective call; sizes may differ between ranks."""
        from ckdist.comm.window import Window

        self._windows += 1
        return Window(self, self._windows - 1, array)

    def keep(self, array: np.ndarray) -> None:
        """Keeps an array alive as long as peers may write it."""
        self._family.exposed.append(array)

    def check_peers(self) -> None:
        """Raises CommError if a rank of the job is known to be lost. Never blocks.

        For a rank that waits for something other than its peers.
        """
        native.check(lib.ckdist_communicator_check_peers(self.handle))

    def abandon(self, reason: str) -> None:
        """Aborts the job: later calls of all ranks raise CommError with the reason.

        For a rank that failed outside a call of this communicator.
        """
        native.check(lib.ckdist_communicator_abandon(self.handle, reason.encode()))

    def split(self, color: int, key: int = -1) -> "Communicator | None":
        """Returns the communicator of the ranks with the same color. A collective call.

        Args:
            color: Negative: this rank gets None.
            key: The new ranks are ordered by it. -1: by the present rank.
        """
        made = native.call(lib.ckdist_communicator_split, self.handle, color, key if key >= 0 else self.rank)
        return None if made is None else Communicator(ffi.gc(made, lib.ckdist_communicator_free), self._family)

    def close(self) -> None:
        """Leaves the job after a barrier: all ranks leave together. Arrays in the arena stay valid.

        Peers take a process that ends without it for one that died.
        """
        self.under_way.clear()
        if self.handle is not None:
            native.check(lib.ckdist_communicator_leave(self.handle))
        self.handle = None

    def _run(self, call: NativeCall, result: Result, *used: np.ndarray) -> Result:  # noqa: ARG002, it blocks
        native.check(call(ffi.NULL))
        return result

    def begin(self, call: NativeCall, result: Result, *used: object) -> Operation[Result]:
        """Starts a native call. `used`: objects that stay alive until the operation is complete."""
        out = ffi.new("struct ckdist_operation **")
        native.check(call(out))
        return Operation(self.under_way, ffi.gc(out[0], lib.ckdist_operation_free), result, *used)


class StartedCollectives(Collectives[Operation[np.ndarray], Operation[None]]):
    """The collectives of a communicator, which return at once."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.size, self.handle = communicator.rank, communicator.size, communicator.handle
        self._run = communicator.begin


def open_communicator(
    world: World,
    transport: str = "auto",
    *,
    timeout: float = 30.0,
    spins: int | None = None,
    share: bool = True,
    arena_bytes: int = ARENA_BYTES,
    interface: str | None = None,
    thresholds: Thresholds | None = None,
    log: Log | None = None,
) -> Communicator:
    """Opens the communicator of all ranks of a world. A collective call.

    Args:
        world: The ranks.
        transport: auto: shared memory inside a host, the fastest measured transport between hosts (`choose_transport`).
            A name: that transport between hosts, and on a single host in place of shared memory.
        timeout: Longest wait for a peer, in seconds.
        spins: Polls of a flag before a waiting thread sleeps. Default: many; few if ranks outnumber CPUs.
        share: False: no shared memory at all.
        arena_bytes: Size of each rank's shared arena. The largest value of all ranks counts.
        interface: Name or address for tcp and verbs, or an RDMA device's name for verbs. Default: CKDIST_INTERFACE.
        thresholds: Sizes from which another algorithm is used. Rank 0's count; default: the measured ones.
        log: Receives lines about connections that were dropped.

    Raises:
        ConfigError, CommError: The same error on every rank.
    """
    if transport not in CHOICES:
        raise ConfigError(f"--transport ({transport}) must be one of {', '.join(CHOICES)}")
    # All ranks need the size of their peers' arenas. This gather is also a barrier: ranks load for different times,
    # and the timeout counts from here on.
    arena_bytes = max(world.gather(arena_bytes))
    one_host, here = len(set(world.hosts)) == 1, world.hosts[world.rank]
    local = [r for r, host in enumerate(world.hosts) if host == here]
    share = share and (world.size == 1 or not one_host or transport == "auto")
    spins = spins or (_CROWDED_POLLS if len(local) > (os.cpu_count() or 1) else _PATIENT_POLLS)
    memory = rendezvous = chosen = None
    if share:
        memory, rendezvous = _share(world, local, arena_bytes, spins, timeout)
    if not (share and one_host):
        chosen = _choose(world, transport, timeout, interface, log)
        if chosen.name == "verbs" and not share:
            memory = native.new(lib.ckdist_host_memory_new, None, 0, 1, arena_bytes)  # the transport registers it
    exchanges = (chosen and chosen.times) or []
    chunk = int(CHUNK_SECONDS * (1 << 20) / exchanges[-1]) if exchanges else 0  # the last exchange is of 1 MiB
    sizes = [*world.broadcast(list(thresholds or load_thresholds())), max(CHUNK_BYTES, chunk)]
    host_of_rank = [world.hosts.index(host) for host in world.hosts]
    joined = memory, rendezvous, chosen.handle if chosen else None
    handle = native.new(
        lib.ckdist_communicator_new, world.rank, world.size, host_of_rank, *joined, [sizes], spins, timeout
    )
    world.gather(None)  # the segments are open everywhere
    family = Family(exchanges)
    if chosen and chosen.name == "mpi" and has_mpi(world):
        from ckdist.comm.transports.opening import before_mpi_ends

        before_mpi_ends(world, lambda: [c.close() for c in list(family.members)])
    return Communicator(handle, family)


def _choose(world: World, wanted: str, timeout: float, interface: str | None, log: Log | None) -> "ChosenTransport":
    """Opens, measures and logs the transport between hosts. Ranks of one host need none."""
    from ckdist.comm.bootstrap.sockets import seals
    from ckdist.comm.transports.transport_choice import choose_transport, measured

    chosen = measured(world, choose_transport(world, wanted, timeout, interface, log))
    is_open = len(set(world.hosts)) > 1 and not (chosen.name == "tcp" and seals(world))
    if world.rank == 0:
        logger.log(logging.INFO if is_open else logging.DEBUG, "%s", chosen.reason)
    return chosen


def _share(world: World, local: list[int], arena_bytes: int, spins: int, timeout: float) -> tuple[CData, CData]:
    """Opens the arenas and the shared-memory rendezvous of this host's ranks. The first of them creates both."""
    index, count, paths = local.index(world.rank), len(local), (None, None)
    if index:
        paths = world.gather(None)[local[0]]
    memory = native.new(lib.ckdist_host_memory_new, paths[0], index, count, arena_bytes)
    rendezvous = native.new(lib.ckdist_rendezvous_new, paths[1], index, count, local, spins, timeout)
    if not index:
        made = lib.ckdist_host_memory_path(memory), lib.ckdist_rendezvous_path(rendezvous)
        world.gather([ffi.string(path).decode() for path in made])
    return memory, rendezvous

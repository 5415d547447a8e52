"""The ranks of a job, or some of them, as numpy sees them: the operations of MPI and NCCL, the same as in native code.

Arrays go in and come out; bfloat16 travels as uint16 with dtype="bfloat16". Reductions give the same bits on every
transport, run after run (native/comm/algorithms/order.h). Arrays from `allocate` lie where peers on the same host read
them in place. Every wait ends within `timeout` seconds; a rank that died, gave up or stalls is a CommError that names
it, and after one every later call on the communicator gives it again. Ranks send heartbeats while nothing is called, so
a loss is known before the next call (`check_peers`).
"""

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike

from ckdist import native
from ckdist.comm.operation import Operation
from ckdist.comm.protocol import Log, World, has_mpi
from ckdist.comm.thresholds import Thresholds, load_thresholds
from ckdist.comm.transports.choice import choose_transport
from ckdist.comm.transports.names import CHOICES
from ckdist.comm.transports.opening import before_mpi_ends
from ckdist.comm.window import Window
from ckdist.errors import ConfigError
from ckdist.native import CData

ELEMENTS = native.numbers("ckdist_element", "ckdist_element_")
OPERATIONS = native.numbers("ckdist_reduction", "ckdist_reduction_")
ARENA_BYTES = 4 << 30  # of addresses; memory is used as it is allocated
_PATIENT_POLLS, _CROWDED_POLLS = 20000, 50

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

ffi, lib = native.ffi, native.lib


def _element(array: np.ndarray, dtype: str | None) -> int:
    """The native number of an array's elements. ConfigError where they cannot be exchanged as `dtype`."""
    name = dtype or array.dtype.name
    if name not in ELEMENTS:
        raise ConfigError(f"arrays of {name} cannot be exchanged; use one of {', '.join(ELEMENTS)}")
    if name == "bfloat16" and array.dtype.itemsize != 2:
        raise ConfigError(f"bfloat16 travels in arrays of uint16, not of {array.dtype.name}")
    if name not in ("bfloat16", array.dtype.name):
        raise ConfigError(f"an array of {array.dtype.name} was called {name}")
    return ELEMENTS[name]


def _operation(op: str) -> int:
    """The native number of a reduction. ConfigError for an unknown one."""
    if op not in OPERATIONS:
        raise ConfigError(f"{op!r} is not a reduction; use one of {', '.join(OPERATIONS)}")
    return OPERATIONS[op]


class Family:
    """The communicators that were split from the same one, which share a transport.

    Attributes:
        exposed: Arrays that peers may write as long as the transport lives, also when nothing else holds them.
    """

    def __init__(self) -> None:
        self.members: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self.exposed: list[np.ndarray] = []


class Communicator:
    """Ranks 0 to size - 1, of which this is one. Made by `open_communicator` or `split`.

    All ranks make the same collective calls in the same order. `wait=False` returns an Operation at once.
    """

    def __init__(self, handle: CData, family: "Family", times: tuple[float, float] | None = None) -> None:
        """`handle`: a native ckdist_communicator, which this owns. `times`: between hosts, as of `ChosenTransport`."""
        self._handle, self._family = handle, family
        family.members.add(self)
        self.under_way: set[Operation[Any]] = set()  # operations, which add and remove themselves
        self._windows = 0
        self.rank, self.size = lib.ckdist_communicator_rank(handle), lib.ckdist_communicator_size(handle)
        self.transport = ffi.string(lib.ckdist_communicator_transport(handle)).decode()
        self.exchange_times = times

    @property
    def handle(self) -> CData:
        """The native communicator, for what calls the library itself; None once closed."""
        return self._handle

    def allocate(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> np.ndarray:
        """Zeros in this rank's shared arena; an array of uint16 for bfloat16."""
        kind = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        out = ffi.new("void **")
        native.check(lib.ckdist_communicator_allocate(self._handle, max(size, 1), out))
        if out[0] == ffi.NULL:
            return np.zeros(shape, kind)  # no rank reads it in place
        handle = self._handle
        place = ffi.gc(ffi.cast("char *", out[0]), lambda p: lib.ckdist_communicator_release(handle, p))
        return np.frombuffer(ffi.buffer(place, max(size, 1)), np.uint8)[:size].view(kind).reshape(shape)

    @overload
    def all_reduce(
        self,
        x: np.ndarray,
        op: str = ...,
        out: np.ndarray | None = ...,
        dtype: str | None = ...,
        wait: Literal[True] = True,
    ) -> np.ndarray: ...

    @overload
    def all_reduce(
        self,
        x: np.ndarray,
        op: str = ...,
        out: np.ndarray | None = ...,
        dtype: str | None = ...,
        *,
        wait: Literal[False],
    ) -> Operation[np.ndarray]: ...

    def all_reduce(
        self, x: np.ndarray, op: str = "sum", out: np.ndarray | None = None, dtype: str | None = None, wait: bool = True
    ) -> np.ndarray | Operation[np.ndarray]:
        """The sum (max, min) of all ranks' x, on every rank; `out` may be x."""
        out = np.empty_like(x) if out is None else out
        self._same(out, x.size, x.dtype, "out")
        return self._run(
            lambda o: lib.ckdist_all_reduce(
                self._handle, native.pointer(x), native.pointer(out), x.size, _element(x, dtype), _operation(op), o
            ),
            wait,
            out,
            x,
        )

    @overload
    def reduce_scatter(
        self,
        x: np.ndarray,
        counts: Sequence[int] | None = ...,
        op: str = ...,
        out: np.ndarray | None = ...,
        dtype: str | None = ...,
        wait: Literal[True] = True,
    ) -> np.ndarray: ...

    @overload
    def reduce_scatter(
        self,
        x: np.ndarray,
        counts: Sequence[int] | None = ...,
        op: str = ...,
        out: np.ndarray | None = ...,
        dtype: str | None = ...,
        *,
        wait: Literal[False],
    ) -> Operation[np.ndarray]: ...

    def reduce_scatter(
        self,
        x: np.ndarray,
        counts: Sequence[int] | None = None,
        op: str = "sum",
        out: np.ndarray | None = None,
        dtype: str | None = None,
        wait: bool = True,
    ) -> np.ndarray | Operation[np.ndarray]:
        """This rank's part, counts[rank] elements, of what all_reduce would give; equal parts by default."""
        counts = self._counts(counts, x.size)
        out = np.empty(counts[self.rank], x.dtype) if out is None else out
        self._same(out, counts[self.rank], x.dtype, "out")
        return self._run(
            lambda o: lib.ckdist_reduce_scatter(
                self._handle, native.pointer(x), native.pointer(out), counts, _element(x, dtype), _operation(op), o
            ),
            wait,
            out,
            x,
        )

    @overload
    def all_gather(
        self,
        x: np.ndarray,
        counts: Sequence[int] | None = ...,
        out: np.ndarray | None = ...,
        wait: Literal[True] = True,
    ) -> np.ndarray: ...

    @overload
    def all_gather(
        self, x: np.ndarray, counts: Sequence[int] | None = ..., out: np.ndarray | None = ..., *, wait: Literal[False]
    ) -> Operation[np.ndarray]: ...

    def all_gather(
        self, x: np.ndarray, counts: Sequence[int] | None = None, out: np.ndarray | None = None, wait: bool = True
    ) -> np.ndarray | Operation[np.ndarray]:
        """All ranks' x, one after the other; counts[r] elements of rank r, as many as here by default."""
        parts = [x.size] * self.size if counts is None else self._counts(counts, sum(counts))
        self._same(x, parts[self.rank], x.dtype, "x")
        out = np.empty(sum(parts), x.dtype) if out is None else out
        self._same(out, sum(parts), x.dtype, "out")
        return self._run(
            lambda o: lib.ckdist_all_gather(
                self._handle, native.pointer(x), native.pointer(out), self._bytes(parts, x), o
            ),
            wait,
            out,
            x,
        )

    @overload
    def all_to_all(
        self,
        x: np.ndarray,
        send_counts: Sequence[int] | None = ...,
        recv_counts: Sequence[int] | None = ...,
        out: np.ndarray | None = ...,
        wait: Literal[True] = True,
    ) -> np.ndarray: ...

    @overload
    def all_to_all(
        self,
        x: np.ndarray,
        send_counts: Sequence[int] | None = ...,
        recv_counts: Sequence[int] | None = ...,
        out: np.ndarray | None = ...,
        *,
        wait: Literal[False],
    ) -> Operation[np.ndarray]: ...

    def all_to_all(
        self,
        x: np.ndarray,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        out: np.ndarray | None = None,
        wait: bool = True,
    ) -> np.ndarray | Operation[np.ndarray]:
        """To every rank r the r-th part of x (send_counts[r] elements), from every rank its part for this one."""
        send = self._counts(send_counts, x.size)
        receive = send if recv_counts is None else self._counts(recv_counts, sum(recv_counts))
        if send[self.rank] != receive[self.rank]:
            raise ConfigError(
                f"rank {self.rank} sends itself {send[self.rank]} elements and receives {receive[self.rank]}"
            )
        out = np.empty(sum(receive), x.dtype) if out is None else out
        self._same(out, sum(receive), x.dtype, "out")
        return self._run(
            lambda o: lib.ckdist_all_to_all(
                self._handle, native.pointer(x), self._bytes(send, x), native.pointer(out), self._bytes(receive, x), o
            ),
            wait,
            out,
            x,
        )

    @overload
    def broadcast(self, x: np.ndarray, root: int = ..., wait: Literal[True] = True) -> np.ndarray: ...

    @overload
    def broadcast(self, x: np.ndarray, root: int = ..., *, wait: Literal[False]) -> Operation[np.ndarray]: ...

    def broadcast(self, x: np.ndarray, root: int = 0, wait: bool = True) -> np.ndarray | Operation[np.ndarray]:
        """The root's x, written into every rank's."""
        self._same(x, x.size, x.dtype, "x")
        return self._run(lambda o: lib.ckdist_broadcast(self._handle, native.pointer(x), x.nbytes, root, o), wait, x)

    @overload
    def barrier(self, wait: Literal[True] = True) -> None: ...

    @overload
    def barrier(self, *, wait: Literal[False]) -> Operation[None]: ...

    def barrier(self, wait: bool = True) -> Operation[None] | None:
        """Returns when all ranks have come."""
        return self._run(lambda o: lib.ckdist_barrier(self._handle, o), wait, None)

    def send(self, x: np.ndarray, rank: int, tag: int = 0) -> None:
        """Sends x to `rank`; returns when x may change. `tag`: 0 to 1023."""
        self.isend(x, rank, tag).wait()

    def recv(self, x: np.ndarray, rank: int, tag: int = 0) -> np.ndarray:
        """Receives into x a message of exactly its size from `rank`, and returns x."""
        return self.irecv(x, rank, tag).wait()

    def isend(self, x: np.ndarray, rank: int, tag: int = 0) -> Operation[None]:
        """Sends x, which stays as it is until the operation is complete. `tag`: 0 to 1023."""
        return self.start(
            lambda out: lib.ckdist_isend(self._handle, rank, tag, native.pointer(x), x.nbytes, out), None, x
        )

    def irecv(self, x: np.ndarray, rank: int, tag: int = 0) -> Operation[np.ndarray]:
        """Receives into x a message of exactly its size; messages of one rank with one tag come in their order."""
        self._same(x, x.size, x.dtype, "x")
        return self.start(lambda out: lib.ckdist_irecv(self._handle, rank, tag, native.pointer(x), x.nbytes, out), x)

    def window(self, array: np.ndarray) -> Window:
        """Shows `array` to all ranks. A collective call, in the same order everywhere; sizes may differ."""
        self._windows += 1
        return Window(self, self._windows - 1, array)

    def keep(self, array: np.ndarray) -> None:
        """Keeps an array that peers may write alive as long as they can."""
        self._family.exposed.append(array)

    def check_peers(self) -> None:
        """CommError when a rank of the job is known to be lost; never blocks.

        For a rank that waits for something else than its peers.
        """
        native.check(lib.ckdist_communicator_check_peers(self._handle))

    def abandon(self, reason: str) -> None:
        """Gives up: this rank's later calls, and all ranks' of the job, are CommErrors with the reason.

        For a rank that failed elsewhere.
        """
        native.check(lib.ckdist_communicator_abandon(self._handle, reason.encode()))

    def split(self, color: int, key: int = -1) -> "Communicator | None":
        """The ranks of the same color, ordered by key (-1: by rank); None for a negative color. A collective call."""
        out = ffi.new("struct ckdist_communicator **")
        native.check(lib.ckdist_communicator_split(self._handle, color, key if key >= 0 else self.rank, out))
        return Communicator(ffi.gc(out[0], lib.ckdist_communicator_free), self._family) if out[0] != ffi.NULL else None

    def close(self) -> None:
        """Lets go; the memory goes when the last array in it does. All ranks leave together: a barrier comes before.

        A process that ends without is taken for one that died.
        """
        self.under_way.clear()
        if self._handle is not None:
            native.check(lib.ckdist_communicator_leave(self._handle))
        self._handle = None

    def _counts(self, counts: Sequence[int] | None, total: int) -> list[int]:
        """`counts`, or equal parts of `total`; ConfigError where they are not one for each rank, or another sum."""
        if counts is None:
            if total % self.size:
                raise ConfigError(f"{total} elements cannot be sharded evenly over {self.size} ranks: give counts")
            return [total // self.size] * self.size
        counts = [int(n) for n in counts]
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != total:
            raise ConfigError(f"counts {counts} must be {self.size} numbers, none negative, and {total} in all")
        return counts

    @staticmethod
    def _bytes(counts: list[int], x: np.ndarray) -> list[int]:
        """Elements of x as bytes."""
        return [n * x.itemsize for n in counts]

    @staticmethod
    def _same(array: np.ndarray, size: int, dtype: np.dtype[Any], name: str) -> None:
        """ConfigError where `array` is not a contiguous one of so many elements of this type."""
        if (
            array.size != size
            or array.dtype != dtype
            or not array.flags.c_contiguous
            or (not array.flags.writeable and name == "out")
        ):
            raise ConfigError(f"{name} must be a contiguous array of {size} {dtype}, not of {array.size} {array.dtype}")

    def _run(
        self, call: Callable[[CData], int], wait: bool, result: Result, *used: object
    ) -> Result | Operation[Result]:
        """Makes a native call, which writes no operation where it is given none, and then waits itself."""
        if wait:
            native.check(call(ffi.NULL))
            return result
        return self.start(call, result, *used)

    def start(self, call: Callable[[CData], int], result: Result, *used: object) -> Operation[Result]:
        """Begins a native call, which writes its ckdist_operation to what it is given."""
        out = ffi.new("struct ckdist_operation **")
        native.check(call(out))
        return Operation(self, ffi.gc(out[0], lib.ckdist_operation_free), result, *used)


def open_communicator(
    world: World,
    transport: str = "auto",
    *,
    timeout: float = 30.0,
    spins: int | None = None,
    share: bool = True,
    arena_bytes: int = ARENA_BYTES,
    lanes: int = 1,
    interface: str | None = None,
    thresholds: Thresholds | None = None,
    log: Log | None = None,
) -> Communicator:
    """The communicator of all ranks of a world. A collective call.

    `auto`: shared memory inside a host, and between hosts the transport that measures fastest (`choose_transport`). A
    transport that is named is used between hosts, and on a single host instead of shared memory. `timeout`: seconds
    that any wait for a peer may take. `spins`: polls of a flag before a waiting thread sleeps; by default many, or few
    where ranks outnumber CPUs. `share=False`: no shared memory at all. `arena_bytes`: of each rank's shared arena, the
    most that any rank asks for. `interface`: name or address that tcp and verbs use (default: CKDIST_INTERFACE); verbs
    takes an RDMA device's name too. Raises ConfigError or CommError on every rank alike.
    """
    if transport not in CHOICES:
        raise ConfigError(f"--transport ({transport}) must be one of {', '.join(CHOICES)}")
    # all know where a peer's arena lies; ranks load for different times, and from here on the timeout counts
    arena_bytes = max(world.gather(arena_bytes))
    one_host, here = len(set(world.hosts)) == 1, world.hosts[world.rank]
    local = [r for r, host in enumerate(world.hosts) if host == here]
    share = share and (world.size == 1 or not one_host or transport == "auto")
    spins = spins or (_CROWDED_POLLS if len(local) > (os.cpu_count() or 1) else _PATIENT_POLLS)
    memory, rendezvous, chosen = ffi.NULL, ffi.NULL, None
    if share:
        memory, rendezvous = _share(world, local, arena_bytes, spins, timeout)
    if not (share and one_host):
        chosen = choose_transport(world, transport, timeout, interface, lanes, log)
        if world.rank == 0:
            logger.debug("%s", chosen.reason)
        if chosen.name == "verbs" and not share:
            memory = _own_memory(arena_bytes)
    limits = Thresholds(*world.broadcast(list(thresholds or load_thresholds())))
    out = ffi.new("struct ckdist_communicator **")
    native.check(
        lib.ckdist_communicator_new(
            world.rank,
            world.size,
            [world.hosts.index(host) for host in world.hosts],
            memory,
            rendezvous,
            chosen.handle if chosen else ffi.NULL,
            ffi.new("struct ckdist_thresholds *", list(limits)),
            spins,
            timeout,
            out,
        )
    )
    world.gather(None)  # the segments are open everywhere
    family = Family()
    if chosen and chosen.name == "mpi" and has_mpi(world):
        before_mpi_ends(world, lambda: [c.close() for c in list(family.members)])
    return Communicator(ffi.gc(out[0], lib.ckdist_communicator_free), family, chosen.times if chosen else None)


def _share(world: World, local: list[int], arena_bytes: int, spins: int, timeout: float) -> tuple[CData, CData]:
    """The arenas and the shared-memory rendezvous of this host's ranks; the first of them makes both."""
    if local[0] == world.rank:
        memory, rendezvous = _open_shared(None, world.rank, local, arena_bytes, spins, timeout)
        paths = [lib.ckdist_host_memory_path(memory), lib.ckdist_rendezvous_path(rendezvous)]
        world.gather([ffi.string(path).decode() for path in paths])
        return memory, rendezvous
    return _open_shared(world.gather(None)[local[0]], world.rank, local, arena_bytes, spins, timeout)


def _open_shared(
    paths: list[str] | None, rank: int, local: list[int], arena_bytes: int, spins: int, timeout: float
) -> tuple[CData, CData]:
    """The arenas and the rendezvous at `paths`, or new ones."""
    memory, rendezvous = ffi.new("struct ckdist_host_memory **"), ffi.new("struct ckdist_rendezvous **")
    index = local.index(rank)
    path = [ffi.NULL, ffi.NULL] if paths is None else [ffi.new("char[]", p.encode()) for p in paths]
    native.check(lib.ckdist_host_memory_new(path[0], index, len(local), arena_bytes, memory))
    held = ffi.gc(memory[0], lib.ckdist_host_memory_free)
    native.check(lib.ckdist_rendezvous_new(path[1], index, len(local), local, spins, timeout, rendezvous))
    return held, ffi.gc(rendezvous[0], lib.ckdist_rendezvous_free)


def _own_memory(arena_bytes: int) -> CData:
    """An arena of this rank alone, for a transport with registered memory."""
    out = ffi.new("struct ckdist_host_memory **")
    native.check(lib.ckdist_host_memory_new(ffi.NULL, 0, 1, arena_bytes, out))
    return ffi.gc(out[0], lib.ckdist_host_memory_free)

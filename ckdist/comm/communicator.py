"""The ranks of a job, or some of them, as numpy sees them: the verbs of MPI and NCCL, the same as in native code.

Arrays go in and come out; bfloat16 travels as uint16 with dtype="bfloat16". Reductions give the same bits on every
transport, run after run (native/comm/order.h). Arrays from `allocate` lie where peers on the same host read them in
place. Every wait ends within `timeout` seconds; a rank that died, gave up or stalls is a CommError that names it, and
after one every later call on the communicator gives it again. Ranks tell one another that they live while nothing is
called, so a loss is known before the next call; `check_peers` asks.
"""

import ctypes
import os
import weakref

import numpy as np

from ckdist import native
from ckdist.comm.host_name import machine_name
from ckdist.comm.mesh import connect_mesh
from ckdist.comm.thresholds import Thresholds, load_thresholds
from ckdist.comm.verbs import verbs_wire
from ckdist.errors import ConfigError

ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2, "int32": 3, "int8": 4, "uint8": 5}
OPERATIONS = {"sum": 0, "max": 1, "min": 2}
TRANSPORTS = ("auto", "tcp", "mpi", "verbs")
ARENA_BYTES = 4 << 30  # of addresses; memory is used as it is allocated
_PATIENT_POLLS, _CROWDED_POLLS = 20000, 50

ffi, lib = native.ffi, native.lib


def _element(array: np.ndarray, dtype: str | None) -> int:
    name = dtype or array.dtype.name
    if name not in ELEMENTS:
        raise ConfigError(f"arrays of {name} cannot be exchanged; use one of {', '.join(ELEMENTS)}")
    if name == "bfloat16" and array.dtype.itemsize != 2:
        raise ConfigError(f"bfloat16 travels in arrays of uint16, not of {array.dtype.name}")
    if name != "bfloat16" and array.dtype.name != name:
        raise ConfigError(f"an array of {array.dtype.name} was called {name}")
    return ELEMENTS[name]


def _operation(op: str) -> int:
    if op not in OPERATIONS:
        raise ConfigError(f"{op!r} is not a reduction; use one of {', '.join(OPERATIONS)}")
    return OPERATIONS[op]


class Operation:
    """Something under way. `wait` returns its result; the arrays it uses stay alive until then."""

    def __init__(self, communicator: "Communicator", handle, result, *used):
        self._communicator, self._handle, self._result = communicator, handle, result
        self._used = (result, *used)
        communicator._under_way.add(self)

    def test(self) -> bool:
        """Is it complete? Never blocks; messages make progress in it."""
        if self._handle is not None and native.check(lib.ckdist_operation_test(self._handle)):
            self._finish()
        return self._handle is None

    def wait(self):
        """Its result, once complete. CommError when a peer is lost."""
        if self._handle is not None:
            try:
                native.check(lib.ckdist_operation_wait(self._handle))
            finally:
                self._finish()
        return self._result

    def _finish(self) -> None:
        self._handle = None
        self._communicator._under_way.discard(self)


class Window:
    """Memory of every rank that the others put to and get from; `notify` counts in one of a rank's slots, `wait` for a
    count.

    Between ranks of one host an array from `allocate` is written and read in place, and its owner may do what it likes.
    Any other array is served by its owner while that waits in a call of its communicator: a `get` from a rank that only
    computes takes until its next call (or the timeout), and what was `put` to it is there when its `wait` returns.
    """

    def __init__(self, communicator: "Communicator", number: int, array: np.ndarray):
        self._communicator, self.number, self.array = communicator, number, array
        native.check(lib.ckdist_expose(communicator._handle, number, native.pointer(array), array.nbytes))

    def put(self, data: np.ndarray, rank: int, offset: int = 0) -> Operation:
        """Writes `data` at byte `offset` of `rank`'s array; complete when `data` may change.

        `notify` tells the rank.
        """
        return self._communicator._start(
            lambda out: lib.ckdist_iput(
                self._communicator._handle, rank, self.number, offset, native.pointer(data), data.nbytes, out
            ),
            None,
            data,
            self,
        )

    def get(self, out: np.ndarray, rank: int, offset: int = 0) -> Operation:
        """Reads `out` from byte `offset` of `rank`'s array."""
        return self._communicator._start(
            lambda o: lib.ckdist_iget(
                self._communicator._handle, rank, self.number, offset, native.pointer(out), out.nbytes, o
            ),
            out,
            self,
        )

    def notify(self, rank: int, slot: int = 0) -> Operation:
        """Adds one to a counter of `rank`, after everything put to it before."""
        return self._communicator._start(
            lambda out: lib.ckdist_inotify(self._communicator._handle, rank, self.number, slot, out), None, self
        )

    def wait(self, count: int, slot: int = 0) -> None:
        """Returns when this rank's counter has reached `count`."""
        native.check(lib.ckdist_await_notified(self._communicator._handle, self.number, slot, count))


class Communicator:
    """Ranks 0 to size - 1, of which this is one. Made by `open_communicator` or `split`.

    All ranks make the same collective calls in the same order. `wait=False` returns an Operation at once.
    """

    def __init__(self, handle, family: "weakref.WeakSet[Communicator]"):
        self._handle, self._family = handle, family  # the communicators that were split from the same one
        family.add(self)
        self._under_way: set[Operation] = set()
        self._windows = 0
        self.rank, self.size = lib.ckdist_communicator_rank(handle), lib.ckdist_communicator_size(handle)
        self.transport = ffi.string(lib.ckdist_communicator_transport(handle)).decode()

    def allocate(self, shape, dtype="float32") -> np.ndarray:
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

    def all_reduce(
        self, x: np.ndarray, op: str = "sum", out: np.ndarray | None = None, dtype: str | None = None, wait: bool = True
    ):
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

    def reduce_scatter(
        self,
        x: np.ndarray,
        counts=None,
        op: str = "sum",
        out: np.ndarray | None = None,
        dtype: str | None = None,
        wait: bool = True,
    ):
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

    def all_gather(self, x: np.ndarray, counts=None, out: np.ndarray | None = None, wait: bool = True):
        """All ranks' x, one after the other; counts[r] elements of rank r, as many as here by default."""
        counts = [x.size] * self.size if counts is None else self._counts(counts, sum(counts))
        self._same(x, counts[self.rank], x.dtype, "x")
        out = np.empty(sum(counts), x.dtype) if out is None else out
        self._same(out, sum(counts), x.dtype, "out")
        return self._run(
            lambda o: lib.ckdist_all_gather(
                self._handle, native.pointer(x), native.pointer(out), self._bytes(counts, x), o
            ),
            wait,
            out,
            x,
        )

    def all_to_all(
        self, x: np.ndarray, send_counts=None, recv_counts=None, out: np.ndarray | None = None, wait: bool = True
    ):
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

    def broadcast(self, x: np.ndarray, root: int = 0, wait: bool = True):
        """The root's x, written into every rank's."""
        self._same(x, x.size, x.dtype, "x")
        return self._run(lambda o: lib.ckdist_broadcast(self._handle, native.pointer(x), x.nbytes, root, o), wait, x)

    def barrier(self, wait: bool = True):
        """Returns when all ranks have come."""
        return self._run(lambda o: lib.ckdist_barrier(self._handle, o), wait, None)

    def send(self, x: np.ndarray, rank: int, tag: int = 0) -> None:
        self.isend(x, rank, tag).wait()

    def recv(self, x: np.ndarray, rank: int, tag: int = 0) -> np.ndarray:
        return self.irecv(x, rank, tag).wait()

    def isend(self, x: np.ndarray, rank: int, tag: int = 0) -> Operation:
        """Sends x, which stays as it is until the operation is complete. `tag`: 0 to 1023."""
        return self._start(
            lambda out: lib.ckdist_isend(self._handle, rank, tag, native.pointer(x), x.nbytes, out), None, x
        )

    def irecv(self, x: np.ndarray, rank: int, tag: int = 0) -> Operation:
        """Receives into x a message of exactly its size; messages of one rank with one tag come in their order."""
        self._same(x, x.size, x.dtype, "x")
        return self._start(lambda out: lib.ckdist_irecv(self._handle, rank, tag, native.pointer(x), x.nbytes, out), x)

    def window(self, array: np.ndarray) -> Window:
        """Shows `array` to all ranks. A collective call, in the same order everywhere; sizes may differ."""
        self._windows += 1
        return Window(self, self._windows - 1, array)

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
        self._under_way.clear()
        if self._handle is not None:
            native.check(lib.ckdist_communicator_leave(self._handle))
        self._handle = None

    def _counts(self, counts, total: int) -> list[int]:
        if counts is None:
            if total % self.size:
                raise ConfigError(f"{total} elements cannot be cut evenly over {self.size} ranks: give counts")
            return [total // self.size] * self.size
        counts = [int(n) for n in counts]
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != total:
            raise ConfigError(f"counts {counts} must be {self.size} numbers, none negative, and {total} in all")
        return counts

    @staticmethod
    def _bytes(counts: list[int], x: np.ndarray) -> list[int]:
        return [n * x.itemsize for n in counts]

    @staticmethod
    def _same(array: np.ndarray, size: int, dtype, name: str) -> None:
        if (
            array.size != size
            or array.dtype != dtype
            or not array.flags.c_contiguous
            or (not array.flags.writeable and name == "out")
        ):
            raise ConfigError(f"{name} must be a contiguous array of {size} {dtype}, not of {array.size} {array.dtype}")

    def _run(self, call, wait: bool, result, *used):
        if wait:
            native.check(call(ffi.NULL))
            return result
        return self._start(call, result, *used)

    def _start(self, call, result, *used) -> Operation:
        out = ffi.new("struct ckdist_operation **")
        native.check(call(out))
        return Operation(self, ffi.gc(out[0], lib.ckdist_operation_free), result, *used)


def open_communicator(
    world,
    transport: str = "auto",
    *,
    timeout: float = 30.0,
    share: bool = True,
    arena_bytes: int = ARENA_BYTES,
    lanes: int = 1,
    interface: str | None = None,
    thresholds: Thresholds | None = None,
    log=None,
) -> Communicator:
    """The communicator of all ranks of a world. A collective call.

    `auto`: shared memory inside a host, and between hosts MPI where it started the job, else TCP. A transport that is
    named is used between hosts, and on a single host instead of shared memory. `share=False`: no shared memory at all.
    `interface`: name or address that tcp and verbs use; verbs takes an RDMA device's name too.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(f"--transport ({transport}) must be one of {', '.join(TRANSPORTS)}")
    one_host = len(set(world.hosts)) == 1
    local = [r for r, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
    share = share and not (one_host and transport != "auto")
    has_mpi = hasattr(world, "mpi")
    if transport == "auto":
        transport = "mpi" if has_mpi else "tcp"
    elif transport == "mpi" and not has_mpi:
        raise ConfigError("transport mpi was demanded, but no MPI launcher started this process: use mpirun")
    crowded = len(local) > (os.cpu_count() or 1)
    spins = _CROWDED_POLLS if crowded else _PATIENT_POLLS
    memory, meeting, wire = ffi.NULL, ffi.NULL, ffi.NULL
    if share:
        memory, meeting = _share(world, local, arena_bytes, spins, timeout)
    if not (share and one_host):
        wire = _wire(world, transport, interface, lanes, timeout, log)
    if transport == "verbs" and not share:
        memory = _own_memory(arena_bytes)
    limits = Thresholds(*world.broadcast(list(thresholds or load_thresholds())))
    host_of = [world.hosts.index(host) for host in world.hosts]
    out = ffi.new("struct ckdist_communicator **")
    native.check(
        lib.ckdist_communicator_new(
            world.rank,
            world.size,
            host_of,
            memory,
            meeting,
            wire,
            ffi.new("struct ckdist_thresholds *", list(limits)),
            spins,
            timeout,
            out,
        )
    )
    world.gather(None)  # the segments are open everywhere
    family = weakref.WeakSet()
    if wire and transport == "mpi":
        before_mpi_ends(world, lambda: [c.close() for c in list(family)])
    return Communicator(ffi.gc(out[0], lib.ckdist_communicator_free), family)


def _share(world, local: list[int], arena_bytes: int, spins: int, timeout: float):
    """The arenas and the meeting of this host's ranks; the first of them makes both."""
    memory, meeting = ffi.new("struct ckdist_host_memory **"), ffi.new("struct ckdist_meeting **")
    index, paths = local.index(world.rank), []
    for first in (True, False):
        if first == (index == 0):
            path = [ffi.NULL, ffi.NULL] if first else [ffi.new("char[]", p.encode()) for p in paths[local[0]]]
            native.check(lib.ckdist_host_memory_new(path[0], index, len(local), arena_bytes, memory))
            held = ffi.gc(memory[0], lib.ckdist_host_memory_free)
            native.check(lib.ckdist_meeting_new(path[1], index, len(local), local, spins, timeout, meeting))
            met = ffi.gc(meeting[0], lib.ckdist_meeting_free)
        if first:
            own = (
                [
                    ffi.string(lib.ckdist_host_memory_path(held)).decode(),
                    ffi.string(lib.ckdist_meeting_path(met)).decode(),
                ]
                if index == 0
                else None
            )
            paths = world.gather(own)
    return held, met


def _own_memory(arena_bytes: int):
    """An arena of this rank alone, for a wire that must know memory."""
    out = ffi.new("struct ckdist_host_memory **")
    native.check(lib.ckdist_host_memory_new(ffi.NULL, 0, 1, arena_bytes, out))
    return ffi.gc(out[0], lib.ckdist_host_memory_free)


def _wire(world, transport: str, interface: str | None, lanes: int, timeout: float, log):
    if transport == "verbs":
        wire = verbs_wire(world, interface, timeout)
    else:
        wire = _wire_mpi(world, timeout) if transport == "mpi" else _wire_tcp(world, interface, lanes, timeout, log)
    if len(set(world.hosts)) > 1:
        names = [ffi.new("char[]", machine_name(host).encode()) for host in world.hosts]
        native.check(lib.ckdist_wire_name_hosts(wire, names))
    return wire


def _wire_tcp(world, interface: str | None, lanes: int, timeout: float, log):
    out = ffi.new("struct ckdist_wire **")
    native.check(
        lib.ckdist_wire_tcp(world.rank, world.size, lanes, connect_mesh(world, interface, lanes, log), timeout, out)
    )
    return ffi.gc(out[0], lib.ckdist_wire_free)


def before_mpi_ends(world, action) -> None:
    """MPI calls `action` before it ends, whoever ends it: no thread may be in a call of MPI then."""
    world.mpi.COMM_SELF.Set_attr(world.mpi.Comm.Create_keyval(delete_fn=lambda *_: action()), None)


def _wire_mpi(world, timeout: float):
    if world.mpi.Query_thread() < world.mpi.THREAD_MULTIPLE:
        raise ConfigError(
            f"this MPI allows thread level {world.mpi.Query_thread()}, and {world.mpi.THREAD_MULTIPLE} (MPI_THREAD_MULTIPLE) is needed: use a build of MPI with it, or --transport tcp"
        )
    library = ctypes.CDLL(world.mpi.__file__)  # finds the MPI library that mpi4py itself is linked to
    calls = [
        ffi.cast("void *", ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
        for name in ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Iprobe", "MPI_Get_count")
    ]
    comm = world.comm.Dup()
    handle = lambda value: ffi.cast("void *", value.handle)
    out = ffi.new("struct ckdist_wire **")
    native.check(
        lib.ckdist_wire_mpi(*calls, handle(world.mpi.BYTE), handle(comm), world.rank, world.size, timeout, out)
    )
    return ffi.gc(out[0], lib.ckdist_wire_free)

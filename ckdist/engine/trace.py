"""Writes a trace of all threads of all ranks, as a file for Perfetto or chrome://tracing (`--trace FILE`).

Threads write events to lanes of their own in the native library. Each lane is a ring that keeps the newest events. At
the end rank 0 gathers the lanes of all ranks, aligns their clocks and writes the file.
"""

import contextlib
import json
import logging
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from ckdist import __version__, native
from ckdist.comm.world import together
from ckdist.comm.world_protocol import World
from ckdist.errors import ConfigError
from ckdist.native import CData
from ckdist.regular_file import check_replaceable

log = logging.getLogger(__name__)
lib, ffi = native.lib, native.ffi

MAX_EVENTS = 1 << 20  # in a file, about 100 bytes each
LANE_EVENTS = 4096, 1 << 17  # smallest and largest lane
CLOCK_ROUNDS = 32
GATHER_SECONDS = 20.0  # until the other ranks have sent their lanes
EVENT = native.dtype("ckdist_trace_event")
BATCH = ("tokens", "sequences")

# Per phase of an executable: its name, and the name and layer (None: no layer) of each step of the replay.
Labels: TypeAlias = Sequence[tuple[str, Sequence[tuple[str, int | None]]]]

# Numbers of native/api/trace_api.h -> name, category, names of the arguments. Events of a replay name their step or
# phase instead.
KINDS = {
    lib.ckdist_trace_step: ("step", "replay", ()),
    lib.ckdist_trace_barrier: ("barrier", "wait", ()),
    lib.ckdist_trace_exchange: ("exchange", "wait", ()),
    lib.ckdist_trace_prefill: ("prefill", "batch", BATCH),
    lib.ckdist_trace_decode: ("decode", "batch", BATCH),
    lib.ckdist_trace_publish: ("publish", "batch", BATCH),
    lib.ckdist_trace_transition: ("transition", "batch", BATCH),
    lib.ckdist_trace_schedule: ("schedule", "scheduler", BATCH),
    lib.ckdist_trace_run: ("run", "scheduler", BATCH),
    lib.ckdist_trace_sample: ("sample", "scheduler", ("sequences",)),
    lib.ckdist_trace_receive: ("receive", "scheduler", ()),
    lib.ckdist_trace_send: ("send", "scheduler", ("messages",)),
    lib.ckdist_trace_load: ("load weights", "start", ()),
    lib.ckdist_trace_choose: ("choose prefill", "start", ()),
    lib.ckdist_trace_copy: ("copy", "repacker", ("KiB",)),
    lib.ckdist_trace_copy_blocks: ("copy blocks", "cache", ("blocks", "into_cache")),
    lib.ckdist_trace_sum: ("sum", "exchange", ("step", "phase", "chunk")),
    lib.ckdist_trace_data: ("data", "training", ()),
    lib.ckdist_trace_update: ("update", "training", ()),
    lib.ckdist_trace_save: ("save", "training", ()),
}
IN_STEP = (lib.ckdist_trace_step, lib.ckdist_trace_barrier, lib.ckdist_trace_exchange)


class Lane:
    """The lane of one Python thread. Times are those of `time.monotonic_ns`.

    Args:
        handle: A native ckdist_trace_lane, which its trace owns.
    """

    def __init__(self, handle: CData) -> None:
        self._handle = handle

    def add(self, kind: int, begin: int, end: int, first: int = 0, second: int = 0) -> None:
        """Writes an event of `kind` from `begin` to `end`, in ns, with up to two arguments."""
        lib.ckdist_trace_add(self._handle, kind, begin, end, first, second, 0)


class Trace:
    """The lanes of one rank. All ranks construct it together.

    Args:
        threads: Threads per rank, which determine the size of the lanes.

    Attributes:
        handle: The native trace.
        main: Lane of the rank's first thread outside of steps.

    Raises:
        ConfigError: On every rank, if rank 0 cannot write `path`.
    """

    def __init__(self, path: str, world: World, threads: int) -> None:
        self.path, self.world = pathlib.Path(path), world
        together(world, lambda: self._check() if world.rank == 0 else None)
        least, most = LANE_EVENTS
        events = max(least, min(most, MAX_EVENTS // (world.size * (threads + 1))))
        self.handle = native.new(lib.ckdist_trace_new, events)
        self.clock, self.clock_error = clock_offset(world)
        self.main = self.lane("engine" if world.rank == 0 else "start")
        self._written = False

    def lane(self, name: str) -> Lane:
        """Adds a lane for one thread."""
        return Lane(native.call(lib.ckdist_trace_add_lane, self.handle, name))

    @contextlib.contextmanager
    def span(self, kind: int) -> Iterator[None]:
        """Writes an event of the main lane around the `with` block."""
        begin = time.monotonic_ns()
        yield
        self.main.add(kind, begin, time.monotonic_ns())

    def save(self, labels: Labels) -> None:
        """Gathers all lanes and writes the file on rank 0. A collective call, which a lost rank only delays."""
        if not self._written:
            self._written = True
            self._write(self.world.collect(self._lanes(labels), GATHER_SECONDS))

    def save_own(self, labels: Labels) -> None:
        """Writes the lanes of rank 0 alone, for a failed job whose ranks may be gone."""
        if not self._written and self.world.rank == 0:
            self._written = True
            self._write([self._lanes(labels)] + [None] * (self.world.size - 1))

    def _check(self) -> None:
        """Raises ConfigError if the file cannot be written."""
        try:
            check_replaceable(self.path)
            with open(self._temporary, "wb"):
                pass
            self._temporary.unlink()
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise ConfigError(
                f"cannot write --trace {self.path}: {getattr(error, 'strerror', None) or error}"
            ) from None

    @property
    def _temporary(self) -> pathlib.Path:
        """Name of the file until it is complete."""
        return self.path.with_name(f"{self.path.name}.tmp")

    def _lanes(self, labels: Labels) -> dict[str, Any]:
        """This rank's lanes in a form that msgpack can encode."""
        lanes, room, dropped = [], np.empty(LANE_EVENTS[1], EVENT), np.zeros(1, np.int64)
        for i in range(lib.ckdist_trace_lanes(self.handle)):
            count = native.call(lib.ckdist_trace_read, self.handle, i, room, dropped)
            name = ffi.string(lib.ckdist_trace_lane_name(self.handle, i)).decode()
            lanes.append([name, int(dropped[0]), room[:count].tobytes()])
        return {"lanes": lanes, "clock": self.clock, "error": self.clock_error, "labels": labels}

    def _write(self, ranks: list[dict[str, Any] | None] | None) -> None:
        """Writes the file on rank 0. A failure is only logged, since a trace must not fail the traced job."""
        if self.world.rank != 0 or ranks is None:
            return
        try:
            with open(self._temporary, "w", encoding="ascii", buffering=1 << 20) as file:
                file.writelines(_text(ranks, self.world.hosts))
            self._temporary.replace(self.path)
        except OSError as error:
            log.warning("the trace could not be written to %s: %s", self.path, error.strerror or error)
            with contextlib.suppress(OSError):
                self._temporary.unlink()


def clock_offset(world: World) -> tuple[int, int]:
    """The offset from this rank's time.monotonic_ns() to rank 0's, and its largest error. A collective call.

    Ranks of one host share a clock. Otherwise this works like NTP: the reading with the shortest round trip counts, and
    it lies in the middle of that.
    """
    if len(set(world.hosts)) == 1:
        return 0, 0
    best = [[0, 1 << 62] for _ in world.hosts]
    for _ in range(CLOCK_ROUNDS):
        begin = time.monotonic_ns()
        world.broadcast(None)
        readings = world.gather(time.monotonic_ns())
        error = (time.monotonic_ns() - begin) // 2
        best = [
            [begin + error - reading, error] if error < b[1] else b for reading, b in zip(readings, best, strict=True)
        ]
    offset, error = world.broadcast(best)[world.rank]
    return (0, 0) if world.hosts[world.rank] == world.hosts[0] else (offset, error)


def _text(ranks: list[dict[str, Any] | None], hosts: Sequence[str]) -> Iterator[str]:
    """The lines of the file, a JSON object in the Trace Event Format. Times are microseconds since the first event."""
    lanes = [
        (rank, number, name, dropped, np.frombuffer(data, EVENT), own["clock"], own["labels"])
        for rank, own in enumerate(ranks)
        if own is not None
        for number, (name, dropped, data) in enumerate(own["lanes"])
    ]
    first = min((int(events["begin"].min()) + clock for *_, events, clock, _ in lanes if len(events)), default=0)
    yield '{"displayTimeUnit":"ns","traceEvents":['
    for rank, host in enumerate(hosts):
        name = json.dumps(f"rank {rank} ({host.split('/')[0]})")
        yield f'{"," if rank else ""}\n{{"ph":"M","pid":{rank},"name":"process_name","args":{{"name":{name}}}}}'
        yield f',\n{{"ph":"M","pid":{rank},"name":"process_sort_index","args":{{"sort_index":{rank}}}}}'
    for rank, number, name, _, events, clock, labels in lanes:
        yield f',\n{{"ph":"M","pid":{rank},"tid":{number},"name":"thread_name","args":{{"name":{json.dumps(name)}}}}}'
        yield from _events(rank, number, events, first - clock, labels)
    about = {
        "version": __version__,
        "dropped": {f"rank {rank} {name}": dropped for rank, _, name, dropped, *_ in lanes},
        "missing": [f"rank {rank}" for rank, own in enumerate(ranks) if own is None],
        "clock_error_us": {f"rank {rank}": own["error"] / 1e3 for rank, own in enumerate(ranks) if own is not None},
    }
    yield f'\n],"otherData":{json.dumps(about)}}}\n'


def _events(rank: int, lane: int, events: np.ndarray, zero: int, labels: Labels) -> Iterator[str]:
    """Lines of one lane's events, EVENT (events,). `zero`: ns of the first of all events, in the lane's clock."""
    # Enclosing events come first, as readers that build a tree need them. Threads write them last.
    order = np.lexsort((-np.arange(len(events)), -events["end"], events["begin"]))
    steps = [[(name, "" if layer is None else f'"layer":{layer},') for name, layer in steps] for _, steps in labels]
    for begin, end, kind, args in events[order].tolist():
        name, category, names = KINDS[kind]
        if kind in IN_STEP:
            what, layer = steps[args[1]][args[0]]
            shown = f'{layer}"step":{args[0]}'
            name = what if kind == lib.ckdist_trace_step else name
        else:
            shown = ",".join(f'"{n}":{v}' for n, v in zip(names, args, strict=False))
            if kind == lib.ckdist_trace_prefill:
                name = labels[args[2]][0]
        when = f'"ts":{(begin - zero) / 1e3:.3f},"dur":{(end - begin) / 1e3:.3f}'
        what = f'"name":"{name}","cat":"{category}","args":{{{shown}}}'
        yield f',\n{{"ph":"X","pid":{rank},"tid":{lane},{when},{what}}}'


__all__ = ["KINDS", "Lane", "Trace", "clock_offset"]

"""`ckdist bench comm`: times collectives by size, type and buffer placement. `--tune` stores the best thresholds.

Each time is the median of short batches on data that is rewritten before every call. The batches are timed in native
code. The distance between two CPUs can change while a program runs. So each row also has the round trip of a cache
line, measured just before.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ckdist import native
from ckdist.cli.rows import write_rows
from ckdist.comm.collective_calls import ELEMENTS
from ckdist.comm.communicator import Communicator, open_communicator
from ckdist.comm.thresholds import Thresholds, load_thresholds, save_thresholds
from ckdist.comm.world import start_world
from ckdist.comm.world_protocol import World
from ckdist.config.bench_config import BenchConfig
from ckdist.progress import ProgressBar

SIZES = tuple(4 << k for k in range(10, 25, 2))  # bytes: 4 KiB to 64 MiB
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
BATCH_BYTES = 8 << 20
BATCH_CALLS = (2, 1000)  # fewest and most calls in a batch of about BATCH_BYTES
# Sizes in bytes at which `tune` compares both algorithms.
TUNED = (1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10)


class Stopwatch:
    """Times single operations on one communicator, in seconds. Every method is a collective call."""

    def __init__(self, communicator: Communicator):
        self.communicator = communicator

    def collective(self, operation: str, data: np.ndarray, out: np.ndarray, dtype: str) -> float:
        """Times one of COLLECTIVES from `data` to `out`."""
        larger = max(data.size, out.size)
        calls = int(np.clip(BATCH_BYTES // max(1, larger * data.itemsize), *BATCH_CALLS))
        return native.call(
            native.lib.ckdist_time_collective,
            self.communicator.handle,
            COLLECTIVES.index(operation),
            data,
            out,
            larger,
            ELEMENTS[dtype],
            calls,
        )

    def all_reduce(self, data: np.ndarray, dtype: str) -> float:
        """Times an all-reduce in place."""
        return self.collective("all_reduce", data, data, dtype)

    def barrier(self) -> float:
        """Times a barrier."""
        return native.call(native.lib.ckdist_time_barrier, self.communicator.handle, 500)

    def round_trip(self) -> float:
        """Times a cache line's round trip between the host's first two ranks, which must share memory.

        Raises:
            CommError: A rank is too late.
        """
        return native.call(native.lib.ckdist_time_round_trip, self.communicator.handle, 1000)

    def median(self, measure: Callable[[], float], repetitions: int) -> float:
        """Returns rank 0's median on all ranks. A rank that waits for another measures the same time."""
        value = np.array([statistics.median(measure() for _ in range(repetitions))], np.float32)
        self.communicator.broadcast(value)  # in place
        return float(value[0])


def buffer(communicator: Communicator, size: int, dtype: str, placed: bool) -> np.ndarray:
    """Returns zeros of `size` bytes. If `placed`, they are in memory that the ranks of a host share."""
    elements = size // (4 if dtype == "float32" else 2)
    return (
        communicator.allocate(elements, dtype)
        if placed
        else np.zeros(elements, np.float32 if dtype == "float32" else np.uint16)
    )


def buffers(
    communicator: Communicator, operation: str, size: int, dtype: str, placed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (input, output) of an operation. The larger one has `size` bytes."""
    data = buffer(communicator, size, dtype, placed)
    if operation in ("all_reduce", "broadcast"):
        return data, data
    out, part = buffer(communicator, size, dtype, placed), data.size // communicator.size
    return {"reduce_scatter": (data, out[:part]), "all_gather": (data[:part], out), "all_to_all": (data, out)}[
        operation
    ]


def cases(shared: bool) -> Iterator[tuple[int, str, str, bool]]:
    """Yields (size, operation, dtype, placed) of every row except the barrier's."""
    for size in SIZES:
        for operation in COLLECTIVES:
            for dtype in ("float32", "bfloat16") if operation == "all_reduce" else ("float32",):
                for placed in (True, False) if shared else (False,):
                    yield size, operation, dtype, placed


def rows(communicator: Communicator, repetitions: int, progress: bool = False) -> list[dict[str, Any]]:
    """Measures the barrier, and each operation by size, type and buffer placement. A collective call.

    Args:
        progress: Show a bar that advances after each row, never during a measurement.
    """
    watch = Stopwatch(communicator)
    shared = communicator.transport == "shared memory"
    measured, result = [(0, "barrier", "", False), *cases(shared)], []
    with ProgressBar(len(measured), "row", "measuring", progress) as bar:
        for size, operation, dtype, placed in measured:
            measure = watch.barrier
            if size:
                given = buffers(communicator, operation, size, dtype, placed)
                measure = partial(watch.collective, operation, *given, dtype)
            trip = watch.median(watch.round_trip, 3) if shared else None
            seconds = watch.median(measure, repetitions)
            result.append(
                {
                    "transport": communicator.transport,
                    "ranks": communicator.size,
                    "operation": operation,
                    "buffers": ("arena" if placed else "ordinary") if size else "",
                    "dtype": dtype,
                    "bytes": size,
                    "median_us": seconds * 1e6,
                    "gb_per_s": size / max(seconds, 1e-9) * 1e-9,
                    "round_trip_us": trip and trip * 1e6,
                }
            )
            bar.update(1)
    return result


def tune(world: World, repetitions: int) -> Thresholds:
    """Finds the thresholds for this machine and this number of ranks.

    Each is the largest size of TUNED at which the algorithm for small messages is still faster.
    """
    best = load_thresholds()._asdict()
    for field, transport in (("direct_bytes", "auto"), ("transport_direct_bytes", "tcp"), ("leaders_bytes", "auto")):
        hosts = len(set(world.hosts))
        if (field == "direct_bytes" and hosts > 1) or (field == "leaders_bytes" and hosts in (1, world.size)):
            continue
        limits = [Thresholds(**{**best, field: limit}) for limit in (0, 1 << 20)]
        large, small = (Stopwatch(open_communicator(world, transport, thresholds=t)) for t in limits)
        chosen = 0
        for size in TUNED:
            data = [buffer(w.communicator, size, "float32", placed=True) for w in (large, small)]
            times: tuple[list[Any], list[Any]] = ([], [])
            for _ in range(repetitions):  # alternates between the two
                for w, x, t in zip((large, small), data, times, strict=True):
                    t.append(w.all_reduce(x, "float32"))
            if not world.broadcast(statistics.median(times[1]) < statistics.median(times[0])):
                break
            chosen = size
        best[field] = chosen
    return Thresholds(**best)


def run(config: BenchConfig) -> int:
    """Rank 0 prints rows of times, or with --tune the thresholds that it chose and stored. Returns 0."""
    world = start_world(config.encrypt)
    if config.tune:
        start = time.monotonic()
        thresholds = tune(world, config.repetitions)
        if world.rank == 0:
            path = save_thresholds(thresholds)
            write_rows(
                [{**thresholds._asdict(), "seconds": time.monotonic() - start, "file": str(path)}], config.output
            )
    else:
        communicator = open_communicator(world, "auto", timeout=config.comm_timeout)
        result = rows(communicator, config.repetitions, progress=world.rank == 0)
        if world.rank == 0:
            write_rows(result, config.output)
        communicator.barrier()
    world.gather(None)
    world.close()
    return 0

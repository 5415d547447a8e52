"""ckdist's all_reduce beside the MPI that started this job, by turns in one run: medians by distance of the CPUs, and ratios.

    mpirun -n 2 --bind-to none python benchmarks/versus_mpi.py [--seconds 4] [--sizes 4,64,1024] [-o table|json]

Sizes are KiB of float32. Each batch is short and stands between two measurements of a cache line's round trip; it counts only if
both agree on the distance (near: below 0.25 us, far: 0.35 to 0.9) and no rank waited more than 2 % of it for a CPU.
"""

import argparse
import ctypes
import json
import os
import statistics
import time

import numpy as np

from ckdist import native
from ckdist.cli.bench_comm import Stopwatch, buffer
from ckdist.comm.communicator import open_communicator
from ckdist.comm.world import MpiWorld

ffi, lib = native.ffi, native.lib


class MpiAllReduce:
    """Times MPI_Allreduce in place, called from native code as ours is."""

    def __init__(self, world):
        library = ctypes.CDLL(world.mpi.__file__)
        handle = lambda value: ffi.cast("void *", value.handle)
        address = ffi.cast("void *", ctypes.cast(library.MPI_Allreduce, ctypes.c_void_p).value)
        in_place = ffi.cast("void *", -1 if "MPICH" in world.mpi.Get_library_version() else 1)
        self.words = (address, in_place, handle(world.mpi.FLOAT), handle(world.mpi.SUM), handle(world.comm))
        self.out = ffi.new("double *")

    def __call__(self, data: np.ndarray, calls: int) -> float:
        native.check(lib.ckdist_time_mpi_all_reduce(*self.words, native.pointer(data), data.size, data.nbytes, calls, self.out))
        return self.out[0]


def run_queue_ns() -> int:
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1])


def distance(trips) -> str | None:
    if max(trips) < 0.25e-6:
        return "near"
    return "far" if 0.35e-6 < min(trips) and max(trips) < 0.9e-6 else None


def measure(world, communicator, kib: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    watch, mpi = Stopwatch(communicator), MpiAllReduce(world)
    arena, ordinary, narrow = buffer(communicator, kib << 10, "float32", True), buffer(communicator, kib << 10, "float32", False), buffer(communicator, kib << 10, "bfloat16", True)
    calls = int(np.clip((8 << 10) // kib, 2, 300))
    turns = {
        "arena": lambda: watch.all_reduce(arena, "float32"),
        "ordinary": lambda: watch.all_reduce(ordinary, "float32"),
        "mpi": lambda: mpi(ordinary, calls),
        "arena_bfloat16": lambda: watch.all_reduce(narrow, "bfloat16"),
        "barrier": watch.barrier,
    }
    kept: dict[str, dict[str, list[float]]] = {}
    end, flag = time.monotonic() + seconds, np.zeros(1, np.int32)
    while not communicator.broadcast(np.array([time.monotonic() > end], np.int32))[0]:
        for name, turn in turns.items():
            before, waited, start = watch.round_trip(), run_queue_ns(), time.perf_counter()
            value = turn()
            flag[0] = (run_queue_ns() - waited) * 1e-9 > 0.02 * (time.perf_counter() - start)
            where = distance((before, watch.round_trip()))
            if communicator.all_reduce(flag, "max")[0] == 0 and where and value > 0:
                kept.setdefault(where, {}).setdefault(name, []).append(value * 1e6)
                kept[where].setdefault("round_trip", []).append(before * 1e6)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4, help="for each size")
    parser.add_argument("--sizes", default="4,16,64,256,1024,4096,16384,65536", help="KiB")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    world = MpiWorld()
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[world.local_rank % len(cpus)]})
    communicator = open_communicator(world)
    rows = []
    for kib in map(int, given.sizes.split(",")):
        for where, times in measure(world, communicator, kib, given.seconds).items():
            row = {"kib": kib, "distance": where, "batches": min(map(len, times.values())), **{k: statistics.median(v) for k, v in times.items()}}
            if "mpi" in row:
                row |= {f"mpi_over_{k}": row["mpi"] / row[k] for k in ("arena", "ordinary") if k in row}
            rows.append(row)
            if world.rank == 0 and given.output == "table":
                print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    if world.rank == 0 and given.output == "json":
        print(json.dumps({"mpi": world.mpi.Get_library_version().splitlines()[0], "rows": rows}, indent=1))
    communicator.barrier()
    world.close()


if __name__ == "__main__":
    main()

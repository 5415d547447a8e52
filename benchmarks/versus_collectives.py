"""ckdist's collectives beside Open MPI, MPICH and gloo, two ranks on two CPUs, by turns in one run: medians by distance
of the CPUs, and ratios.

python benchmarks/versus_collectives.py --openmpi python --mpich /venvs/mpich/bin/python --gloo /venvs/torch/bin/python
[-o json]

Each peer is named by a Python that has it (mpi4py built for that MPI, whose launcher lies beside it; torch); those not
named are left out. Every side is a pair of processes that sleep until it is their turn. A batch is short, is preceded
by a rewriting of the data before every call (whose own time is taken off), and stands between two measurements of a
cache line's round trip by ckdist's pair: it counts only if both agree on the distance (near: below 0.25 us, far: 0.35
to 0.9) and no rank waited more than 2 % of it for a CPU. Peers are timed in place and with a second buffer, and the
better is taken. `memcpy` is what each core needs to copy as many bytes while the other does too: a rank of two must
read and write at least so many.
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Listener

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
RANKS = 2
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier")
BATCH_BYTES, BATCH_CALLS, SLOW_CALLS = 8 << 20, (2, 1000), (2, 10)
LEAST_ROUNDS, GLOO_EVERY = 12, 24  # rounds: it takes longer than all the others together
PLACEMENTS = 3  # sets of buffers


class Ckdist:
    """Turns of ckdist's own communicator; also measures distance and memcpy for all."""

    def __init__(self, rank: int):
        sys.path.insert(0, str(ROOT))
        from ckdist.cli.bench_comm import Stopwatch, buffers
        from ckdist.comm.bootstrap.tcp_world import TcpWorld
        from ckdist.comm.communicator import open_communicator

        self.world = TcpWorld.from_environment()
        self.communicator = open_communicator(self.world)
        self.watch, self.buffers = Stopwatch(self.communicator), buffers

    def turns(self, operation: str, size: int) -> dict:
        if operation == "barrier":
            return {"ckdist": self.watch.barrier}
        turns = {}
        for dtype in ("float32", "bfloat16") if operation == "all_reduce" else ("float32",):
            for name, placed in (("arena", True), ("ordinary", False)):
                given = self.buffers(self.communicator, operation, size, dtype, placed)
                turns[name + ("_bfloat16" if dtype == "bfloat16" else "")] = lambda given=given, dtype=dtype: (
                    self.watch.collective(operation, *given, dtype)
                )
        if operation == "all_reduce" and size >= 1 << 20:
            turns["memcpy"] = self.memcpy(size)
        return turns

    def memcpy(self, size: int):
        a, b = np.ones((2, size), np.uint8)
        repeats = max(2, (32 << 20) // size)

        def turn() -> float:
            self.watch.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                np.copyto(b, a)
            return (time.perf_counter() - start) / repeats

        return turn

    def round_trip(self) -> float:
        return self.watch.round_trip()


class Mpi:
    """Turns of an MPI, called from native code as ckdist is."""

    def __init__(self, rank: int):
        from mpi4py import MPI

        self.mpi = MPI
        calls = ctypes.CDLL(MPI.__file__)
        self.address = lambda name: ctypes.cast(getattr(calls, name), ctypes.c_void_p)
        self.in_place = -1 if "MPICH" in MPI.Get_library_version() else 1
        self.timer = ctypes.CDLL(str(ROOT / "ckdist" / "native" / "libckdist.so")).ckdist_time_function
        self.version = MPI.Get_library_version().split("\n")[0][:60]

    def turns(self, operation: str, size: int) -> dict:
        mpi, comm, total = self.mpi, self.mpi.COMM_WORLD.handle, self.mpi.SUM.handle
        data, out = np.ones((2, max(1, size // 4)), np.float32)
        a, b, n, part, kind = data.ctypes.data, out.ctypes.data, data.size, data.size // RANKS, mpi.FLOAT.handle
        calls = int(np.clip(BATCH_BYTES // max(1, size), *BATCH_CALLS))

        def turn(function: str, *words: int, dirty: int = size, buffers=(data, out)) -> object:
            given = (ctypes.c_uint64 * 8)(*(w % (1 << 64) for w in words))
            seconds = ctypes.c_double()

            def run() -> float:
                if self.timer(
                    self.address(function),
                    given,
                    ctypes.c_void_p(buffers[0].ctypes.data),
                    ctypes.c_int64(dirty),
                    ctypes.c_int32(calls),
                    ctypes.byref(seconds),
                ):
                    raise RuntimeError(f"{function} failed")
                return seconds.value

            return run

        if operation == "all_reduce":
            turns = {
                "": turn("MPI_Allreduce", self.in_place, a, n, kind, total, comm),
                "_apart": turn("MPI_Allreduce", a, b, n, kind, total, comm),
            }
            if (half := getattr(mpi, "BFLOAT16_T", mpi.DATATYPE_NULL)) != mpi.DATATYPE_NULL:
                turns["_bfloat16"] = turn("MPI_Allreduce", self.in_place, a, 2 * n, half.handle, total, comm)
            return turns
        return {
            "": {
                "reduce_scatter": lambda: turn("MPI_Reduce_scatter_block", a, b, part, kind, total, comm),
                "all_gather": lambda: turn("MPI_Allgather", a, part, kind, b, part, kind, comm, dirty=size // RANKS),
                "all_to_all": lambda: turn("MPI_Alltoall", a, part, kind, b, part, kind, comm),
                "broadcast": lambda: turn("MPI_Bcast", a, n, kind, 0, comm),
                "barrier": lambda: turn("MPI_Barrier", comm, dirty=0),
            }[operation]()
        }


class Gloo:
    """Turns of torch.distributed over gloo; its calls take a millisecond, so they are timed from Python."""

    def __init__(self, rank: int):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=RANKS)
        self.torch, self.dist, self.version = torch, dist, f"gloo of torch {torch.__version__}"

    def turns(self, operation: str, size: int) -> dict:
        if operation != "all_reduce":
            return {}
        calls = int(np.clip(BATCH_BYTES // size, *SLOW_CALLS))

        def turn(x) -> float:
            spent = 0.0
            for i in range(calls):
                x.fill_(i)
                start = time.perf_counter()
                self.dist.all_reduce(x)
                spent += time.perf_counter() - start
            return spent / calls

        wide, narrow = self.torch.zeros(size // 4), self.torch.zeros(size // 2, dtype=self.torch.bfloat16)
        return {"": lambda: turn(wide), "_bfloat16": lambda: turn(narrow)}


def work(side: str, address: str) -> None:
    """One process of a pair: does what it is told until it is told nothing more."""
    rank = int(next(os.environ[v] for v in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK") if v in os.environ))
    if side != "gloo":  # its helper threads want the other CPU
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    pair = {"ckdist": Ckdist, "gloo": Gloo}.get(side, Mpi)(rank)
    with Client(address, "AF_UNIX") as connection:
        connection.send((side, rank, getattr(pair, "version", "ckdist")))
        turns: list[dict] = []
        while command := connection.recv():
            if command[0] == "prepare":
                turns = []  # the last buffers go first
                turns = [pair.turns(*command[1:]) for _ in range(PLACEMENTS)]
                connection.send(sorted(turns[0]))
                continue
            waited, start = run_queue_ns(), time.perf_counter()
            value = pair.round_trip() if command[0] == "round_trip" else turns[command[2]][command[1]]()
            connection.send((value, (run_queue_ns() - waited) * 1e-9 / (time.perf_counter() - start)))


def run_queue_ns() -> int:
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1])


class Pair:
    """The two processes of a side, seen from outside."""

    def __init__(self, side: str, python: str, listener: Listener, folder: str):
        program = [python, str(pathlib.Path(__file__).resolve()), "--work", side, "--address", listener.address]
        beside = pathlib.Path(python).parent.resolve() if "/" in python else pathlib.Path()
        environments: list[dict] = [{}]
        if side == "openmpi":
            program = [str(beside / "mpirun"), "-n", str(RANKS), "--bind-to", "none", *program]
        elif side == "mpich":
            program = [str(beside / "mpiexec"), "-n", str(RANKS), "-bind-to", "none", *program]
            # each rank has a CPU: yielding would only cost it time
            environments = [{"MPIR_CVAR_POLLS_BEFORE_YIELD": "0"}]
        else:
            port = "29751" if side == "ckdist" else "29752"
            base = {
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "CKDIST_JOB_SECRET_FILE": f"{folder}/secret",
            }
            environments = [{**base, "RANK": str(r)} for r in range(RANKS)]
        self.processes = [subprocess.Popen(program, env={**os.environ, **e}, stdout=sys.stderr) for e in environments]
        connections = {}
        for _ in range(RANKS):
            connection = listener.accept()
            _, rank, self.version = connection.recv()
            connections[rank] = connection
        self.connections = [connections[r] for r in range(RANKS)]

    def ask(self, *command) -> list:
        for connection in self.connections:
            connection.send(command)
        return [connection.recv() for connection in self.connections]

    def end(self) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.wait(timeout=30)


def distance(trips) -> str | None:
    if max(trips) < 0.25e-6:
        return "near"
    return "far" if min(trips) > 0.35e-6 and max(trips) < 0.9e-6 else None


def measure(pairs: dict[str, Pair], operation: str, size: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Microseconds of every turn, by distance."""
    turns = [(side, name) for side, pair in pairs.items() for name in pair.ask("prepare", operation, size)[0]]
    kept: dict[str, dict[str, list[float]]] = {}
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end or rounds < LEAST_ROUNDS:
        rounds += 1
        for side, name in turns:
            if side == "gloo" and rounds % GLOO_EVERY != 1:
                continue
            before = pairs["ckdist"].ask("round_trip")[0][0]
            answers = pairs[side].ask("turn", name, (rounds // GLOO_EVERY if side == "gloo" else rounds) % PLACEMENTS)
            where = distance((before, pairs["ckdist"].ask("round_trip")[0][0]))
            value = max(v for v, _ in answers)
            if where and value > 0 and (side == "gloo" or max(w for _, w in answers) < 0.02):
                times = kept.setdefault(where, {})
                times.setdefault(name if side == "ckdist" else side + name, []).append(value * 1e6)
                times.setdefault("round_trip", []).append(before * 1e6)
    return kept


def row_of(operation: str, size: int, where: str, times: dict[str, list[float]]) -> dict:
    row = {
        "operation": operation,
        "kib": size >> 10,
        "distance": where,
        "batches": min(len(v) for k, v in times.items() if "gloo" not in k),
        **{k: statistics.median(v) for k, v in sorted(times.items())},
    }
    peers = [row[k] for k in ("openmpi", "openmpi_apart", "mpich", "mpich_apart") if k in row]
    if peers:
        row["better_mpi"] = min(peers)
        row |= {f"{k}_ratio": min(peers) / row[k] for k in ("arena", "ordinary", "ckdist") if k in row}
    for name in ("arena", "ordinary"):
        if name in row and name + "_bfloat16" in row:
            row[f"{name}_bfloat16_per_byte"] = row[name + "_bfloat16"] / row[name]
    if "memcpy" in row and "arena" in row:
        row["arena_over_memcpy"] = row["arena"] / row["memcpy"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for side in ("openmpi", "mpich", "gloo"):
        parser.add_argument(f"--{side}", metavar="PYTHON", help=f"a Python that has {side}")
    parser.add_argument("--operations", default="all_reduce,barrier", help=f"of {','.join(OPERATIONS)}")
    parser.add_argument("--sizes", default="4,16,64,256,1024,4096,16384,65536", help="KiB, of the larger buffer")
    parser.add_argument("--seconds", type=float, default=6, help="for each size")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.address)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/address", "AF_UNIX") as listener:
        secret = pathlib.Path(folder, "secret")
        secret.touch(0o600)
        secret.write_text(os.urandom(32).hex())
        pythons = {
            "ckdist": sys.executable,
            **{side: python for side in ("openmpi", "mpich", "gloo") if (python := getattr(given, side))},
        }
        pairs = {side: Pair(side, python, listener, folder) for side, python in pythons.items()}
        for operation in given.operations.split(","):
            for size in (0,) if operation == "barrier" else [int(k) << 10 for k in given.sizes.split(",")]:
                for where, times in sorted(measure(pairs, operation, size, given.seconds).items()):
                    rows.append(row_of(operation, size, where, times))
                    if given.output == "table":
                        print(
                            "  ".join(
                                f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()
                            ),
                            flush=True,
                        )
        if given.output == "json":
            print(json.dumps({"sides": {side: pair.version for side, pair in pairs.items()}, "rows": rows}, indent=1))
        for pair in pairs.values():
            pair.end()


if __name__ == "__main__":
    main()

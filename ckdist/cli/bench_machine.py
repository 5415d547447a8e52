"""`ckdist bench machine`: what this machine can do at most, each limit by code that does nothing else."""

from dataclasses import dataclass

from ckdist import native
from ckdist.cli.node_speed import read_bandwidth
from ckdist.cli.rows import write_rows
from ckdist.comm.world import start_world
from ckdist.config import BenchConfig
from ckdist.planner import SPINS
from ckdist.topology import default_threads, place

ARITHMETIC = {0: "fma", 1: "bf16", 2: "int8"}  # by activation format: what products with it are made of
ARITHMETIC_SECONDS = 0.03
REPEATS = 5


@dataclass(frozen=True)
class Bounds:
    """Bytes per second read from memory, and operations per second by activation format, of all ranks together."""

    read_bandwidth: float
    arithmetic: dict[int, float]

    def seconds(self, bytes_read: float, operations: dict[int, float]) -> tuple[str, float]:
        """What a step that reads and computes so much is bound by, "bandwidth" or "arithmetic", and the least time it can take."""
        read = bytes_read / self.read_bandwidth
        computed = sum(count / self.arithmetic[format] for format, count in operations.items())
        return ("bandwidth", read) if read >= computed else ("arithmetic", computed)


def arithmetic_rate(threads: int, cpus, format: int) -> float:
    """Operations per second of `threads` threads of this process; one multiplication and its addition are two."""
    return _measured("ckdist_arithmetic_rate", threads, _pins(cpus, threads), format, ARITHMETIC_SECONDS, REPEATS)


def measure_bounds(world, threads: int, cpus) -> Bounds:
    """The limits of all ranks at work at once; a collective call."""

    def together(measure) -> float:
        world.gather(None)  # start together
        return sum(world.gather(measure()))

    bandwidth = together(lambda: read_bandwidth(threads, cpus))
    return Bounds(bandwidth, {format: together(lambda: arithmetic_rate(threads, cpus, format)) for format in ARITHMETIC})


def run(config: BenchConfig) -> int:
    world = start_world()
    threads = config.threads or default_threads(world)
    cpus = place(world, threads).cpus
    row = {"isa": native.ffi.string(native.lib.ckdist_isa()).decode(), "ranks": world.size, "n_threads": threads}
    if world.rank == 0:
        row |= {"read_bandwidth_1": read_bandwidth(1, cpus[:1]), "read_bandwidth": 0.0}
        row |= {f"{name}_1": arithmetic_rate(1, cpus[:1], format) for format, name in ARITHMETIC.items()}
    bounds = measure_bounds(world, threads, cpus)
    if world.rank == 0:
        row |= {"read_bandwidth": bounds.read_bandwidth} | {name: bounds.arithmetic[format] for format, name in ARITHMETIC.items()}
        row["barrier"] = _measured("ckdist_barrier_seconds", threads, _pins(cpus, threads), SPINS)
        if threads > 1:
            row["line_round_trip"] = _measured("ckdist_line_round_trip", _pins(cpus, 2), 21)
        write_rows([row], config.output)
    world.close()
    return 0


def _pins(cpus, threads: int):
    return native.ffi.new("int32_t[]", list(cpus)) if len(cpus) >= threads else native.ffi.NULL


def _measured(function: str, *arguments) -> float:
    out = native.ffi.new("double *")
    native.check(getattr(native.lib, function)(*arguments, out))
    return out[0]

"""`ckdist bench machine`: peak rates of this machine, each measured by code that does nothing else.

The first row is for the instruction level whose kernels run. Each other level of this CPU has a row with its own
arithmetic rates.
"""

import logging
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckdist import native
from ckdist.cli.rows import write_rows
from ckdist.comm.world import start_world
from ckdist.comm.world_protocol import World
from ckdist.config.bench_config import BenchConfig
from ckdist.errors import ConfigError
from ckdist.layouts.rank_plan import SPINS
from ckdist.topology import default_threads, place
from ckdist.topology.arithmetic import ARITHMETIC, arithmetic_rate
from ckdist.topology.bandwidth import read_bandwidth
from ckdist.topology.instructions import reason
from ckdist.topology.machine import this_machine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """Peak rates of all ranks together."""

    read_bandwidth: float  # bytes/s from memory
    arithmetic: dict[int, float]  # operations/s by activation format

    def seconds(self, bytes_read: float, operations: dict[int, float]) -> tuple[str, float]:
        """Returns the limit of a step, "bandwidth" or "arithmetic", and the least seconds that it can take.

        Args:
            operations: Number of operations by activation format.
        """
        read = bytes_read / self.read_bandwidth
        computed = sum(count / self.arithmetic[form] for form, count in operations.items())
        return ("bandwidth", read) if read >= computed else ("arithmetic", computed)


def together(world: World, measure: Callable[[], float]) -> float:
    """Returns the sum of `measure()` over all ranks, which run it at the same time. A collective call."""
    world.gather(None)  # a barrier: all start together
    return sum(world.gather(measure()))


def measure_arithmetic(world: World, threads: int, cpus: Sequence[int], isa: str | None = None) -> dict[int, float]:
    """Returns the operations/s of all ranks by activation format. A collective call.

    Args:
        isa: Level of instructions. None: the level in use.
    """
    return {form: together(world, partial(arithmetic_rate, threads, cpus, form, isa)) for form in ARITHMETIC}


def measure_bounds(world: World, threads: int, cpus: Sequence[int]) -> Bounds:
    """Measures the peak rates while all ranks work at once. A collective call."""
    return Bounds(together(world, lambda: read_bandwidth(threads, cpus)), measure_arithmetic(world, threads, cpus))


def run(config: BenchConfig) -> int:
    """Measures on all ranks. Rank 0 prints a row per level of instructions, or writes a machine file. Returns 0."""
    world = start_world()
    if config.save is not None:
        return save(config.save, world)
    threads = default_threads(world, config.threads)
    cpus = place(world, threads).cpus
    row = {"isa": native.isa(), "isa_reason": reason(), "ranks": world.size, "n_threads": threads}
    if world.rank == 0:
        row |= {"read_bandwidth_1": read_bandwidth(1, cpus[:1]), "read_bandwidth": 0.0}
        row |= {f"{name}_1": arithmetic_rate(1, cpus[:1], form) for form, name in ARITHMETIC.items()}
    bounds = measure_bounds(world, threads, cpus)
    others = [isa for isa, lacks in native.isas().items() if not lacks and isa != native.isa()]
    rates = {isa: measure_arithmetic(world, threads, cpus, isa) for isa in others}
    if world.rank == 0:
        row |= {"read_bandwidth": bounds.read_bandwidth} | {
            name: bounds.arithmetic[form] for form, name in ARITHMETIC.items()
        }
        pins = _pins(cpus, threads)
        caches = this_machine().caches(pins) if pins else None
        row["barrier"] = _measured("ckdist_barrier_seconds", threads, pins, caches, SPINS)
        if threads > 1:
            row["line_round_trip"] = _measured("ckdist_line_round_trip", _pins(cpus, 2), 21)
        rows = [row]
        for isa in others:
            single_core = {f"{name}_1": arithmetic_rate(1, cpus[:1], form, isa) for form, name in ARITHMETIC.items()}
            all_cores = {name: rates[isa][form] for form, name in ARITHMETIC.items()}
            rows.append(row | {"isa": isa, "isa_reason": "CKDIST_ISA chooses it"} | single_core | all_cores)
        write_rows(rows, config.output)
    world.close()
    return 0


def save(path: str, world: World) -> int:
    """Writes the figures of this machine to `path` for `ckdist plan`. Returns 0.

    Raises:
        ConfigError: The file cannot be written.
    """
    from ckdist.plan.this_machine import measured

    if world.rank == 0:
        if pathlib.Path(path).is_dir() or not pathlib.Path(path).parent.is_dir():
            raise ConfigError(f"cannot write --save {path}: it is a folder, or its folder does not exist")
        log.info("measuring this machine for about 20 s, or longer if it is busy")
    spec = measured(world)
    if spec is not None:
        try:
            pathlib.Path(path).write_text(spec.toml(), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write --save {path}: {getattr(error, 'strerror', None) or error}") from None
        print(f"{path}: {spec.name}, {spec.nodes} x {spec.cores} cores, {spec.bandwidth / 1e9:.1f} GB/s a node")
    world.close()
    return 0


def _pins(cpus: Sequence[int], threads: int) -> Any:
    return cpus if len(cpus) >= threads else None


def _measured(function: str, *arguments: Any) -> float:
    return native.call(getattr(native.lib, function), *arguments)

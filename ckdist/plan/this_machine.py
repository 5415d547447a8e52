"""The figures of this machine for plans: measured once and cached, or saved by `ckdist bench machine --save`.

Memory, products, attention, norms and barriers are measured by kernels, on the first node with CPUs that this process
may use. Its cores work at once, and medians count. Other nodes are assumed to be equal. The bundled model gives the
time between two steps. It takes about twenty seconds.
"""

import dataclasses
import logging
import statistics
import time
from collections.abc import Sequence

import numpy as np

from ckdist import native
from ckdist.comm.transports.link import measured_link
from ckdist.comm.world import SingleWorld
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.lockstep import LockstepSequences
from ckdist.layouts.rank_plan import SPINS
from ckdist.plan.kernel_speed import COLS, ROWS, attention_rate, elementwise_rate, product_rate
from ckdist.plan.machine_spec import MANY, MEASURED, MachineSpec, kept_machine, kept_path
from ckdist.topology import Machine, this_machine
from ckdist.topology.bandwidth import node_cpus
from ckdist.weights import dtypes

log = logging.getLogger(__name__)

SECONDS, PASSES = 0.01, 15  # of one measurement; the median counts
LARGE_PASSES = 3  # of products of many rows, which take longer
LEAST_LARGE = 4 << 20  # bytes of weights per thread in products of many rows
STREAMED = "BF16", "Q8_0", "Q4_K"  # types whose weights are read from memory and from the caches; the fastest counts
LEAST_STREAMED = 96 << 20  # bytes of weights per thread, so that they come from memory
CACHED = 0.5  # of the caches, for weights that come from these
RANK_PART = 0.25  # of the bandwidth, with which ranks of a host read each other's memory: assumed, not measured
STEPS, CONTEXT, TURNS = 48, 64, 5  # decode steps of the bundled model, tokens before them, and repetitions


def this_machine_spec() -> MachineSpec:
    """Returns the stored figures of this host. If there are none, measures and stores them."""
    known = kept_machine(machine_title(this_machine()), native.isa())
    if known is not None:
        return known
    log.info("measuring this machine once; `ckdist bench machine --save FILE` measures it again")
    spec = measured(SingleWorld())
    assert spec is not None  # on rank 0
    path = kept_path()
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(spec.toml(), encoding="utf-8")
        except OSError as error:
            log.warning("cannot store the measured figures in %s: %s", path, error.strerror)
    return spec


def machine_title(machine: Machine) -> str:
    """The name of a machine in its file."""
    return machine.model[:80] or "this machine"


def measured(world: World) -> MachineSpec | None:
    """Measures this machine, and its link to the job's other hosts. A collective call; None except on rank 0."""
    link = measured_link(world, "auto", 30.0) if len(set(world.hosts)) > 1 else None
    world.gather(None)  # the others are idle while rank 0 measures
    if world.rank:
        world.broadcast()
        return None
    spec = measure_machine(this_machine())
    world.broadcast(True)
    if link is not None:
        return dataclasses.replace(spec, link_seconds=min(link.seconds, 10.0), link_rate=link.rate)
    return spec


def measure_machine(machine: Machine, kinds: Sequence[dtypes.TensorType] = dtypes.KNOWN) -> MachineSpec:
    """Measures one node by its kernels, and the time between two steps. `kinds`: types of weights in `rates`."""
    nodes = node_cpus(machine)
    first, cpus = next(iter(nodes.items()))
    place = [first] if len(machine.nodes) > 1 else []
    native.check(native.lib.ckdist_place_memory(place, len(place), 1))
    cache = float(len({machine.by_number[cpu].l3 for cpu in cpus}) * machine.l3_bytes)
    bandwidth = read_rate(cpus, LEAST_STREAMED)
    return MachineSpec(
        name=machine_title(machine),
        source=MEASURED,
        isa=native.isa(),
        nodes=len(nodes),
        cores=len(cpus),
        memory=float(machine.memory.total or native.lib.ckdist_available_memory()) / len(nodes),
        bandwidth=bandwidth,
        cache=cache,
        cache_bandwidth=max(bandwidth, read_rate(cpus, int(CACHED * cache / len(cpus)))) if cache else 0.0,
        attention=attention_rate(cpus, "i16", 20 * SECONDS),
        elementwise=elementwise_rate(cpus, 20 * SECONDS),
        between=between_steps(len(cpus) * len(nodes)),
        barrier=tuple((count, barrier(cpus[:count])) for count in counts(len(cpus))),
        rank_rate=RANK_PART * bandwidth,
        rates={kind.name: product_rates(cpus, kind, cache) for kind in kinds},
    )


def read_rate(cpus: list[int], size: int) -> float:
    """Bytes of weights per second in products of one row with matrices of `size` bytes for each CPU."""
    found = 0.0
    for kind in (dtypes.BY_NAME[name] for name in STREAMED):
        operations = len(cpus) * product_rate(cpus, kind.number, 1, SECONDS, matrix_rows(cpus, kind, size), PASSES)
        found = max(found, operations / 2 * kind.block_bytes / kind.block_elements)
    return found


def product_rates(cpus: list[int], kind: dtypes.TensorType, cache: float) -> tuple[float, float]:
    """Operations per second of a CPU in products of 1 and of MANY rows.

    In products of one row, weights are in a core's caches: a step's bytes are priced separately. In products of many
    rows they come from memory, as in a prompt.
    """
    rows = matrix_rows(cpus, kind, max(LEAST_LARGE, int(2 * cache / len(cpus))))
    many = product_rate(cpus, kind.number, MANY, SECONDS, rows, LARGE_PASSES)
    return product_rate(cpus, kind.number, 1, SECONDS / 2, ROWS, PASSES), many


def matrix_rows(cpus: list[int], kind: dtypes.TensorType, size: int) -> int:
    """Rows of a matrix of COLS columns with `size` bytes, or with this CPU's part of the available memory."""
    size = min(size, native.lib.ckdist_available_memory() // (8 * len(cpus)))
    return max(16, int(size / COLS / kind.block_bytes * kind.block_elements) // 16 * 16)


def counts(cores: int) -> list[int]:
    """2, 4, 8, ... below `cores`, then `cores`; none for one core."""
    return [*(1 << power for power in range(1, cores.bit_length()) if 1 << power < cores), *[cores][: cores > 1]]


def barrier(cpus: list[int]) -> float:
    """Seconds of a barrier of one thread on each CPU."""
    caches = this_machine().caches(cpus)
    once = lambda: native.call(native.lib.ckdist_barrier_seconds, len(cpus), cpus, caches, SPINS)
    return statistics.median(once() for _ in range(PASSES))


def between_steps(threads: int) -> float:
    """Seconds outside the steps of a decode with the bundled model: the median of some repetitions."""
    model = load_model(EngineConfig(ctx_size=512, parallel=1, repack="off", threads=threads), SingleWorld())
    try:
        executable, ids = model.executable, np.zeros((STEPS, 1), np.int32)
        found = []
        for _ in range(TURNS):
            sequence = LockstepSequences(executable, 1)
            sequence.fill(np.zeros(CONTEXT, np.int32))
            executable.stats(reset=True)
            began = time.perf_counter()
            for _logits in sequence.run(ids):
                pass
            stats = executable.stats()
            found.append((time.perf_counter() - began - stats.total) / stats.runs)
    finally:
        model.close()
    return max(0.0, statistics.median(found))

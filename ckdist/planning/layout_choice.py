"""Tensors or stages over several hosts: what is predicted to be faster on the link that was measured.

Tensor-parallel ranks share every layer, and add up over the hosts twice in each. Stages have layers of their own, and
send each row once; one sequence alone passes them one after the other. So a slow link favours stages, and a fast one
tensors. Three things are predicted of each way: a sequence that decodes alone, several that decode together, and a
prompt. The way with the least geometric mean is chosen.
"""

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckdist import native
from ckdist.comm.protocol import World
from ckdist.comm.transports.link import measured_link
from ckdist.config.engine import EngineConfig
from ckdist.errors import CkdistError, ConfigError
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import nominal
from ckdist.planning.kept_rates import keep_rates, kept_rates
from ckdist.planning.kernel_speed import attention_rate, elementwise_rate, product_rates
from ckdist.planning.layouts import uneven
from ckdist.planning.machine import PRODUCT_ROWS, MachineSpec
from ckdist.planning.predict import Predictor, Way
from ckdist.topology import default_threads, place, this_machine
from ckdist.topology.bandwidth import METHOD, read_bandwidth
from ckdist.topology.binding import own_cpus
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.dtypes import BY_NUMBER
from ckdist.weights.loader import planned_type

PROMPT, CONTEXT, SEQUENCES = 2048, 512, 8  # tokens of a prompt, and before those that are decoded; of these together
READ_BYTES, READ_REPEATS = 64 << 20, 2  # per thread, of what is measured
KERNEL_SECONDS = 0.005  # of one measurement of a kernel
ROUNDS, ROUNDS_SECONDS = 4, 1.0  # of all measurements, at most; the best of each counts, for neighbours disturb some
ACHIEVED_READ = 0.7  # of what is measured that products reach


@dataclass(frozen=True)
class LayoutChoice:
    """How many stages there are to be, 1: tensors over all ranks; and a line that says why."""

    stages: int
    reason: str


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds of a way: a token of one sequence, a token of each of several, and a prompt."""

    stages: int
    alone: float
    together: float
    prompt: float

    @property
    def mean(self) -> float:
        """Geometric, so that no situation outweighs the others."""
        return math.prod((self.alone, self.together, self.prompt)) ** (1 / 3)


def stage_counts(world: World, config: EngineConfig, layers: int) -> list[int]:
    """The numbers of stages that are possible, ascending: those of whole hosts each, and of parts of one host each.

    A number that a flag names is the only one.
    """
    if config.pipeline_parallel_size:
        return [config.pipeline_parallel_size]
    hosts = len(set(world.hosts))
    found = [n for n in range(1, min(world.size, layers) + 1) if world.size % n == 0]
    found = [n for n in found if hosts % n == 0 or n % hosts == 0]
    if config.tensor_parallel_size:
        found = [n for n in found if world.size // n == config.tensor_parallel_size]
    return found or [1]


def choose_layout(world: World, config: EngineConfig, checkpoint: Checkpoint) -> LayoutChoice:
    """What `--layout auto` chooses, the same on every rank; a collective call.

    CommError where the link cannot be measured. What cannot be predicted is not chosen.
    """
    hosts, counts = len(set(world.hosts)), stage_counts(world, config, len(checkpoint.spec.layers))
    if len(counts) == 1:
        why = "there is one rank" if world.size == 1 else "flags, ranks and layers leave no other"
        return LayoutChoice(counts[0], f"{_named(counts[0])}: {why}")
    if hosts == 1:
        return LayoutChoice(counts[0], f"{_named(counts[0])}: all ranks share memory")
    if differing := uneven(world):
        return LayoutChoice(counts[0], f"{_named(counts[0])}: nothing is predicted where {differing}")
    machine = measured_machine(world, config, checkpoint)
    chosen = None
    if world.rank == 0:
        cluster = Cluster(machine, hosts, ranks=world.local_size)
        chosen = best_layout(checkpoint, cluster, config, counts)
    stages, reason = world.broadcast(chosen and [chosen.stages, chosen.reason])
    return LayoutChoice(stages, reason)


def best_layout(checkpoint: Checkpoint, cluster: Cluster, config: EngineConfig, counts: Sequence[int]) -> LayoutChoice:
    """Of these numbers of stages the one that is predicted to be fastest on a cluster."""
    forecasts = sorted(_forecasts(checkpoint, cluster, config, counts), key=lambda f: f.mean)
    if not forecasts:
        return LayoutChoice(counts[0], f"{_named(counts[0])}: nothing can be predicted of this model")
    best, *others = forecasts
    if not others:
        return LayoutChoice(best.stages, f"{_named(best.stages)}: the model can be divided in no other way")
    second, link = others[0], cluster.machine.link
    alone, together = (
        f"{1e3 * own:.1f} against {1e3 * other:.1f} ms"
        for own, other in ((best.alone, second.alone), (best.together, second.together))
    )
    return LayoutChoice(
        best.stages,
        f"{_named(best.stages)} rather than {_named(second.stages)}: predicted {alone} for a token of one sequence, "
        f"{together} of {SEQUENCES} sequences, {best.prompt:.2f} against {second.prompt:.2f} s for a prompt of "
        f"{PROMPT} tokens; "
        f"{link.seconds * 1e6:.0f} µs and {link.rate / 1e6:.0f} MB/s between hosts",
    )


def measured_machine(world: World, config: EngineConfig, checkpoint: Checkpoint) -> MachineSpec:
    """What the slowest rank reads and computes while all do, by the kernels of the model's own types, and the link
    between hosts; a collective call.
    """
    threads = config.threads or default_threads(world)
    cpus = (place(world, threads).cpus or own_cpus())[:threads]
    types = _matrix_types(checkpoint, config.quantize)
    own = _best_rates(world, cpus, types, anew=config.layout == "auto")
    read, attention, elementwise, *products = (min(each) for each in zip(*world.gather(own), strict=True))
    share = len(cpus) / threads  # of a core that a thread has
    rows = len(PRODUCT_ROWS)
    link = measured_link(world, config.transport, config.comm_timeout)
    return replace(
        nominal(native.isa()),
        name="measured",
        cores=threads,
        nodes=world.local_size,
        bandwidth=read,
        achieved_bandwidth=ACHIEVED_READ,
        core_bandwidth=read / threads,
        attention=share * attention,
        elementwise=share * elementwise,
        link_seconds=link.seconds,
        link_rate=link.rate,
        products={
            BY_NUMBER[number].name: tuple(share * rate for rate in products[i * rows : (i + 1) * rows])
            for i, number in enumerate(types)
        },
    )


def _best_rates(world: World, cpus: Sequence[int], types: Sequence[int], anew: bool) -> list[float]:
    """What this rank measures while all do, or has measured before, unless it is to be measured anew; a collective
    call.
    """
    built = native.LIBRARY.stat().st_mtime_ns
    key = json.dumps([METHOD, built, this_machine().model, native.isa(), [*cpus], [*types], world.local_size])
    kept = None if anew else kept_rates(key, 3 + len(PRODUCT_ROWS) * len(types))
    if all(world.gather(kept is not None)):  # all start together, too
        return kept or []
    rounds, end = [_measured_rates(cpus, types)], time.monotonic() + ROUNDS_SECONDS
    while len(rounds) < ROUNDS and time.monotonic() < end:
        rounds.append(_measured_rates(cpus, types))
    own = [max(rates) for rates in zip(*rounds, strict=True)]
    keep_rates(key, own)
    return own


def _matrix_types(checkpoint: Checkpoint, quantize: str | None) -> list[int]:
    """The ggml numbers of the types in which the model's matrices are packed, ascending."""
    matrices = ((name, source) for name, source in checkpoint.tensors.items() if len(source.shape) > 1)
    return sorted({planned_type(name, source, quantize) for name, source in matrices})


def _measured_rates(cpus: Sequence[int], types: Iterable[int]) -> list[float]:
    """Bytes per second that the CPUs read together; of one the rates of attention, of elementwise work, and of products
    with each type and number of rows.
    """
    found = [
        read_bandwidth(len(cpus), cpus, READ_REPEATS, READ_BYTES),
        attention_rate(cpus[0], "i16", KERNEL_SECONDS),
        elementwise_rate(cpus[0], KERNEL_SECONDS),
    ]
    for number in types:
        found += product_rates(cpus, number, KERNEL_SECONDS, 1)
    return found


def _forecasts(
    checkpoint: Checkpoint, cluster: Cluster, config: EngineConfig, counts: Iterable[int]
) -> Iterable[Forecast]:
    """Of each number of stages that the model can be divided into."""
    tokens = min(config.ubatch_size, config.batch_size)
    for count in counts:
        way = Way(_named(count), 1, count, config.prefill, config.experts)
        try:
            p = Predictor(checkpoint, cluster, way, tokens, config.quantize, (config.cache_type_k, config.cache_type_v))
            one, several = (p.decode(n, CONTEXT).seconds for n in (1, SEQUENCES))
            yield Forecast(count, one, several, p.prefill(PROMPT).seconds)
        except (CkdistError, ConfigError):  # it cannot be divided so
            continue


def _named(stages: int) -> str:
    """A way in words."""
    return "tensors over all ranks" if stages == 1 else f"{stages} stages"


__all__ = ["LayoutChoice", "best_layout", "choose_layout", "stage_counts"]

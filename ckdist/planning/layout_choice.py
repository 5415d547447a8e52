"""Chooses tensor or pipeline parallelism over several hosts: the one that is predicted to be faster.

With tensor parallelism, hosts share each layer and sum twice per layer. With pipeline parallelism, a stage has its own
layers and sends each row once, but one sequence passes the stages in order. So a slow link favours stages, and a fast
link tensors. The prediction uses the measured link. It has three times: decode of one sequence, decode of several
sequences, and a prompt. The smallest geometric mean wins.
"""

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckdist import native
from ckdist.comm.transports.link import measured_link
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.errors import CkdistError, ConfigError
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import nominal
from ckdist.planning.kept_rates import keep_rates, kept_rates
from ckdist.planning.kernel_speed import attention_rate, elementwise_rate, product_rates
from ckdist.planning.layouts import uneven
from ckdist.planning.machine_spec import PRODUCT_ROWS, MachineSpec
from ckdist.planning.predict import Predictor, Way
from ckdist.topology import default_threads, place, this_machine
from ckdist.topology.bandwidth import METHOD, read_bandwidth
from ckdist.topology.binding import own_cpus
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.dtypes import BY_NUMBER
from ckdist.weights.loader import planned_type

PROMPT, CONTEXT, SEQUENCES = 2048, 512, 8  # prompt tokens; context tokens of decode; sequences that decode together
READ_BYTES, READ_REPEATS = 64 << 20, 2  # measured bytes per thread
KERNEL_SECONDS = 0.005  # time of one measurement of a kernel
ROUNDS, ROUNDS_SECONDS = (
    4,
    1.0,
)  # upper limits for all measurements; the best counts, since other processes disturb some
ACHIEVED_READ = 0.7  # fraction of the measured bandwidth that products reach


@dataclass(frozen=True)
class LayoutChoice:
    """The number of stages (1: tensor parallelism over all ranks), and the reason in one line."""

    stages: int
    reason: str


@dataclass(frozen=True)
class Forecast:
    """Predicted seconds for a number of stages."""

    stages: int
    alone: float  # a token of one sequence
    together: float  # a token of each of SEQUENCES sequences
    prompt: float

    @property
    def mean(self) -> float:
        """The geometric mean, so that no time outweighs the others."""
        return math.prod((self.alone, self.together, self.prompt)) ** (1 / 3)


def stage_counts(world: World, config: EngineConfig, layers: int) -> list[int]:
    """The possible numbers of stages, ascending: a stage has whole hosts, or a part of one host.

    If a flag sets the number, only that one.
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
    """The choice of `--layout auto`, the same on all ranks. A collective call.

    Raises CommError if the link cannot be measured. Layouts that cannot be predicted are not chosen.
    """
    hosts, counts = len(set(world.hosts)), stage_counts(world, config, len(checkpoint.spec.layers))
    if len(counts) == 1:
        why = "there is one rank" if world.size == 1 else "flags, ranks and layers leave no other"
        return LayoutChoice(counts[0], f"{_named(counts[0])}: {why}")
    if hosts == 1:
        return LayoutChoice(counts[0], f"{_named(counts[0])}: all ranks share memory")
    if differing := uneven(world):
        return LayoutChoice(counts[0], f"{_named(counts[0])}: there is no prediction, because {differing}")
    machine = measured_machine(world, config, checkpoint)
    chosen = None
    if world.rank == 0:
        cluster = Cluster(machine, hosts, ranks=world.local_size)
        chosen = best_layout(checkpoint, cluster, config, counts)
    stages, reason = world.broadcast(chosen and [chosen.stages, chosen.reason])
    return LayoutChoice(stages, reason)


def best_layout(checkpoint: Checkpoint, cluster: Cluster, config: EngineConfig, counts: Sequence[int]) -> LayoutChoice:
    """The number of stages in `counts` that is predicted to be fastest on a cluster."""
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
    """Measures read bandwidth, kernels for the model's types, and the link between hosts. A collective call.

    All ranks measure at once; the slowest rank counts.
    """
    threads = config.threads or default_threads(world)
    cpus = (place(world, threads).cpus or own_cpus())[:threads]
    types = _matrix_types(checkpoint, config.quantize)
    own = _best_rates(world, cpus, types, again=config.layout == "auto")
    read, attention, elementwise, *products = (min(each) for each in zip(*world.gather(own), strict=True))
    share = len(cpus) / threads  # cores per thread
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


def _best_rates(world: World, cpus: Sequence[int], types: Sequence[int], again: bool) -> list[float]:
    """This rank's rates, measured while all ranks measure, or stored earlier unless `again`. A collective call."""
    built = native.LIBRARY.stat().st_mtime_ns
    key = json.dumps([METHOD, built, this_machine().model, native.isa(), [*cpus], [*types], world.local_size])
    kept = None if again else kept_rates(key, 3 + len(PRODUCT_ROWS) * len(types))
    if all(world.gather(kept is not None)):  # also a barrier, so that all measure at once
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
    """[bytes/s that the CPUs read together; rates of one CPU: attention, elementwise, products by type and rows]."""
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
    """Predicts each number of stages that the model can be divided into."""
    tokens = min(config.ubatch_size, config.batch_size)
    for count in counts:
        way = Way(_named(count), 1, count, config.prefill, config.experts)
        try:
            p = Predictor(checkpoint, cluster, way, tokens, config.quantize, (config.cache_type_k, config.cache_type_v))
            one, several = (p.decode(n, CONTEXT).seconds for n in (1, SEQUENCES))
            yield Forecast(count, one, several, p.prefill(PROMPT).seconds)
        except (CkdistError, ConfigError):  # this number of stages is not possible
            continue


def _named(stages: int) -> str:
    return "tensors over all ranks" if stages == 1 else f"{stages} stages"


__all__ = ["LayoutChoice", "best_layout", "choose_layout", "stage_counts"]

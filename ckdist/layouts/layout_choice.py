"""Chooses tensor or pipeline parallelism over several hosts: the one that is predicted to be faster.

With tensor parallelism, hosts share each layer and sum twice per layer. With pipeline parallelism, a stage has its own
layers and sends each row once, but one sequence passes the stages in order. So a slow link favours stages, and a fast
link tensors. The prediction uses the measured link and nominal figures of the hosts. It has three times: decode of one
sequence, decode of several sequences, and a prompt. The smallest geometric mean wins.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckdist import native
from ckdist.comm.thresholds import Thresholds
from ckdist.comm.transports.link import Link, measured_link, one_sum
from ckdist.comm.world_protocol import World
from ckdist.config.engine_config import EngineConfig
from ckdist.layout import SINGLE
from ckdist.layouts.phase_layouts import uneven
from ckdist.layouts.rough_cost import work
from ckdist.mesh import Mesh
from ckdist.models.decoder import main_forward
from ckdist.program.tracer import trace
from ckdist.topology import default_threads
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.loader import planned_type
from ckdist.weights.packed_type import cost_of_type

PROMPT, SEQUENCES = 2048, 8  # prompt tokens; sequences that decode together
ADVISED_GAIN = 2.0
PIECES = 64, 128, 256, 512  # tokens of a step, for prompts through stages


@dataclass(frozen=True)
class LayoutChoice:
    """The number of stages (1: tensor parallelism over all ranks), and the reason in one line."""

    stages: int
    reason: str
    gain: float = 1.0  # geometric mean of the times of the second best layout over those of this one


@dataclass(frozen=True)
class RoughTimes:
    """Seconds of steps over some hosts."""

    steps: dict[int, float]  # tokens of a step -> its seconds if all ranks share it evenly, without exchange
    width: int  # elements of a hidden state
    sums: int  # sums over ranks in a step
    hosts: int
    link: Link

    def stage(self, tokens: int, stages: int) -> float:
        """Seconds in which one of `stages` stages computes a step and sends its rows."""
        over = self.hosts // stages  # hosts of a stage
        link, direct = self.link, Thresholds().transport_direct_bytes
        sums = self.sums / stages * one_sum(tokens, self.width, over, direct).seconds(link) if over > 1 else 0.0
        return self.steps[tokens] + sums + (link.message(4.0 * tokens * self.width) if stages > 1 else 0.0)

    def forecast(self, stages: int) -> tuple[float, float, float]:
        """Seconds of a token of one sequence, of a token of each of SEQUENCES sequences, and of a prompt."""
        alone = stages * self.stage(1, stages)
        groups = min(stages, SEQUENCES)  # that decode in different stages at once
        together = min(stages * self.stage(n, stages) for n in (SEQUENCES, max(1, SEQUENCES // groups)))
        pieces = PIECES if stages > 1 else PIECES[-1:]
        return alone, together, min((PROMPT // n + stages - 1) * self.stage(n, stages) for n in pieces)


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

    Raises CommError if the link cannot be measured.
    """
    hosts, counts = len(set(world.hosts)), stage_counts(world, config, len(checkpoint.spec.layers))
    if len(counts) == 1:
        why = "there is one rank" if world.size == 1 else "flags, ranks and layers leave no other"
        return LayoutChoice(counts[0], f"{_named(counts[0])}: {why}")
    if hosts == 1:
        return LayoutChoice(counts[0], f"{_named(counts[0])}: all ranks share memory")
    if differing := uneven(world):
        return LayoutChoice(counts[0], f"{_named(counts[0])}: there is no prediction, because {differing}")
    threads = min(world.gather(default_threads(world, config.threads)))
    link, chosen = measured_link(world, config.transport, config.comm_timeout), None
    if world.rank == 0:
        chosen = best_layout(checkpoint, config, counts, (hosts, threads * world.size), link)
    return LayoutChoice(*world.broadcast(chosen and [chosen.stages, chosen.reason]))


def best_layout(
    checkpoint: Checkpoint, config: EngineConfig, counts: Sequence[int], size: tuple[int, int], link: Link
) -> LayoutChoice:
    """The fastest number of stages of `counts`. `size`: (hosts, threads of all ranks)."""
    spec, isa = checkpoint.spec, native.isa()
    program = trace(main_forward(spec), spec, SINGLE, Mesh())
    kind = lambda name: cost_of_type(planned_type(name, checkpoint.tensors[name], config.quantize), isa)
    done = functools.partial(work, program.instrs, Mesh(), kind, isa)
    steps = {n: done(n, min(n, SEQUENCES)).seconds / size[1] for n in (*range(1, SEQUENCES + 1), *PIECES)}
    times = RoughTimes(steps, spec.hidden_size, 2 * len(spec.layers) + 1, size[0], link)
    forecasts = sorted((math.prod(times.forecast(n)), n, times.forecast(n)) for n in counts)
    (_, best, own), (_, second, other), *_ = forecasts
    alone, together = (f"{1e3 * a:.1f} against {1e3 * b:.1f} ms" for a, b in zip(own[:2], other[:2], strict=True))
    return LayoutChoice(
        best,
        f"{_named(best)} rather than {_named(second)}: predicted {alone} for a token of one sequence, {together} of "
        f"{SEQUENCES} sequences, {own[2]:.2f} against {other[2]:.2f} s for a prompt of {PROMPT} tokens; "
        f"{link.seconds * 1e6:.0f} µs and {link.rate / 1e6:.0f} MB/s between hosts",
        math.prod(b / a for a, b in zip(own, other, strict=True)) ** (1 / 3),
    )


def layout_advice(
    world: World, config: EngineConfig, checkpoint: Checkpoint, threads: int, exchanges: Sequence[float]
) -> list[str]:
    """One line if flags chose tensors over all hosts, and stages are predicted to take less than half of the time.

    Args:
        threads: The threads of each rank.
        exchanges: Measured seconds of exchanges of `SMALL` and of `LARGE` bytes between hosts.
    """
    spec, hosts = checkpoint.spec, len(set(world.hosts))
    if uneven(world) or not spec.generates or spec.reads_whole:
        return []
    free = replace(config, pipeline_parallel_size=0, tensor_parallel_size=0)
    counts = [n for n in stage_counts(world, free, len(spec.layers)) if n in (1, hosts)]
    if len(counts) == 1:
        return []
    small, large = exchanges
    choice = best_layout(checkpoint, config, counts, (hosts, threads * world.size), Link.of_exchanges(small, large))
    if choice.stages == 1 or choice.gain < ADVISED_GAIN:
        return []
    return [f"this network suits -pp {choice.stages}: {choice.reason}"]


def _named(stages: int) -> str:
    return "tensors over all ranks" if stages == 1 else f"{stages} stages"

"""Predicts one job over hosts that differ: tensors over all ranks, in equal parts or in those of `--tensor-split auto`.

Each kind of host is predicted as a cluster of its own, with the number of hosts of the job. Its seconds for memory and
arithmetic are then scaled by (share of a rank) / (share of a rank of that cluster). A step ends with its slowest rank.
All hosts compute at the best level of instructions that each has (`common_level`).

With stages, each host is one. The seconds of a stage are scaled by (its layers) / (layers of an even stage).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckdist.errors import ConfigError
from ckdist.layouts.rank_shares import FULLEST, shares_of, stored_bytes
from ckdist.layouts.stage_plan import even_slices
from ckdist.plan.cost import Times
from ckdist.plan.machine_spec import MachineSpec
from ckdist.plan.predict import Predictor, Question, Way
from ckdist.plan.step_shape import StepShape

MOST_HOSTS = 4096


@dataclass(frozen=True)
class Kind:
    """Identical hosts of a job."""

    machine: MachineSpec
    hosts: int


@dataclass(frozen=True)
class MixedAnswer:
    """The prediction for one division of the model."""

    shares: tuple[int, ...]  # of one rank of each kind; with stages: the layers of its hosts, from the first host on
    fullest: float  # most of a rank's memory that is used, as a fraction
    decode: float  # tokens per second of all sequences; 0.0 if the model does not fit
    prefill: float
    stages: int = 1


def kinds_of(text: str) -> list[tuple[str, int]]:
    """The machines and numbers of hosts in "a.toml:2,b.toml:1"; one host each without a number.

    Raises:
        ConfigError: A number is out of range.
    """
    found = []
    for part in text.split(","):
        name, _, count = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "1")
        if not name or not count.isdecimal() or not 1 <= int(count[:9]) <= MOST_HOSTS:
            raise ConfigError(f"--machine {part.strip()[:100]!r}: use NAME:HOSTS with 1 to {MOST_HOSTS} hosts")
        found.append((name, int(count)))
    return found


def mixed_answers(question: Question, kinds: Sequence[Kind]) -> list[MixedAnswer]:
    """The answers for equal parts and, if they differ, for those of `--tensor-split auto`. The fastest comes first.

    Args:
        question: Its cluster gives the threads of a node and the ranks of a host; its machine does not count.
    """
    hosts = sum(kind.hosts for kind in kinds)
    clusters = [replace(question.cluster, machine=kind.machine, hosts=hosts) for kind in kinds]
    predictors = [Predictor(question.on(cluster), Way("tensor")) for cluster in clusters]
    counts = [kind.hosts * cluster.local_size for kind, cluster in zip(kinds, clusters, strict=True)]
    rates = [cluster.machine.bandwidth * cluster.machine.nodes / cluster.local_size for cluster in clusters]
    most = [FULLEST * cluster.rank_memory / stored_bytes(question.checkpoint) for cluster in clusters]
    by_rank = lambda values: [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
    measured = shares_of(by_rank(rates), by_rank(most))
    firsts = [sum(counts[:index]) for index in range(len(kinds))]
    choices = {(1,) * len(kinds), tuple(measured[first] for first in firsts) if measured else (1,) * len(kinds)}
    found = [_answer(question, predictors, counts, shares) for shares in choices]
    return sorted(found, key=lambda one: (-one.decode, one.fullest))


def _answer(
    question: Question, predictors: Sequence[Predictor], counts: Sequence[int], shares: tuple[int, ...]
) -> MixedAnswer:
    whole = sum(share * count for share, count in zip(shares, counts, strict=True))
    factors = [share / whole * each.cluster.size for share, each in zip(shares, predictors, strict=True)]
    fullest = 0.0
    for factor, each in zip(factors, predictors, strict=True):
        memory = each.memory(question.context, question.sequences)[0]
        scaled = memory.total + (factor - 1) * (memory.weights + memory.cache)
        fullest = max(fullest, scaled / each.cluster.rank_memory)
    if fullest > 1:
        return MixedAnswer(shares, fullest, 0.0, 0.0)
    decode = _seconds(factors, [each.decode(question.sequences, question.context).times for each in predictors])
    prefill = _seconds(factors, [each.prefill(question.prompt).times for each in predictors])
    return MixedAnswer(shares, fullest, question.sequences / decode, question.prompt / prefill)


def _seconds(factors: Sequence[float], times: Sequence[Times]) -> float:
    """Seconds of a step: its slowest rank, then the slowest exchange, link and latency of any kind of host."""
    own = max(
        factor * (each.bandwidth + each.arithmetic) + each.latency for factor, each in zip(factors, times, strict=True)
    )
    return math.fsum([own, max(each.exchange for each in times), max(each.link for each in times)])


def staged_answers(question: Question, kinds: Sequence[Kind]) -> list[MixedAnswer]:
    """The answers with a stage per host: even stages, those of `--tensor-split auto`, and those that suit prompts.

    Returns:
        The fastest for prompts comes first. Empty if the job would refuse such stages: hosts have different numbers of
        ranks, or there are more hosts than layers.
    """
    hosts, layers = sum(kind.hosts for kind in kinds), len(question.checkpoint.spec.layers)
    clusters = [replace(question.cluster, machine=kind.machine, hosts=hosts) for kind in kinds]
    if not 1 < hosts <= layers or len({cluster.local_size for cluster in clusters}) > 1:
        return []
    predictors = [Predictor(question.on(cluster), Way("stages", stages=hosts)) for cluster in clusters]
    prompt, pieces = _prompt_piece(question, predictors[0])
    batches = predictors[0].costs.groups(question.sequences)
    decode = StepShape.decode(-(-question.sequences // batches), question.context)
    by_host = lambda values: [value for value, kind in zip(values, kinds, strict=True) for _ in range(kind.hosts)]
    seconds = {
        shape: by_host([math.fsum(times.total for times in each.stage_times(shape)) / hosts for each in predictors])
        for shape in (prompt, decode)
    }
    memory = by_host([_even_memory(question, each) for each in predictors])
    room = by_host([each.cluster.rank_memory for each in predictors])
    rates = by_host([kind.machine.bandwidth * kind.machine.nodes for kind in kinds])
    found = {}
    for speeds in ([1.0] * hosts, rates, [1 / each for each in seconds[prompt]]):
        divided = even_slices([1.0] * layers, hosts, [max(1, round(1000 * speed / max(speeds))) for speed in speeds])
        own = tuple(end - begin for begin, end in divided)
        factors = [count * hosts / layers for count in own]
        fullest = max(
            (fixed + factor * part) / most for (fixed, part), factor, most in zip(memory, factors, room, strict=True)
        )
        first, second = (
            [factor * each for factor, each in zip(factors, seconds[shape], strict=True)] for shape in (prompt, decode)
        )
        whole = pieces * max(first) + math.fsum(first) - max(first)
        step = max(math.fsum(second), batches * max(second))
        fits = fullest <= 1
        found[own] = MixedAnswer(own, fullest, fits * question.sequences / step, fits * question.prompt / whole, hosts)
    return sorted(found.values(), key=lambda one: -one.prefill)


def _prompt_piece(question: Question, predictor: Predictor) -> tuple[StepShape, int]:
    """A chunk of the prompt in its middle, and the number of chunks."""
    tokens = question.prompt
    piece = min(question.ubatch_size, -(-tokens // predictor.costs.pieces(predictor.costs.work(0, tokens))))
    return StepShape.prompt(piece, (tokens - piece) // 2), -(-tokens // piece)


def _even_memory(question: Question, predictor: Predictor) -> tuple[float, float]:
    """Bytes of a rank of an even stage: those that do not grow with its layers, and the others."""
    fullest = max(predictor.memory(question.context, question.sequences), key=lambda memory: memory.total)
    grows = fullest.weights + fullest.cache
    return fullest.total - grows, grows

"""Compares the ways to divide a model over a cluster: memory, speed and bottleneck of each.

It also predicts the gain from more hosts, bandwidth or cores, or from a faster link.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckdist.errors import UserError
from ckdist.layout import SINGLE
from ckdist.layouts.rough_cost import active_elements
from ckdist.mesh import Mesh
from ckdist.models.decoder import main_forward
from ckdist.models.spec import MoeFfn
from ckdist.plan.cluster import MAX_RANKS
from ckdist.plan.predict import Predictor, Question, Rate, Way, ways_for
from ckdist.plan.rank_memory import RankMemory
from ckdist.program.tracer import trace
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.described import describe_config

MORE = 2.0  # factor on a resource in `changes`
USERS = 1, 4, 16, 64, 256
SMALLER_TYPES = "F8_E4M3", "Q8_0", "Q4_K"  # for a model that does not fit


@dataclass(frozen=True)
class Answer:
    """The prediction for one way."""

    way: Way
    memory: list[RankMemory]  # of the first rank of each stage
    decode: Rate | None  # None if the model does not fit
    prefill: Rate | None

    @property
    def fits(self) -> bool:
        """True if there is enough memory. If not, there is no prediction of speed."""
        return self.decode is not None

    @property
    def largest(self) -> RankMemory:
        """The memory of the rank that needs the most."""
        return max(self.memory, key=lambda memory: memory.total)

    def seconds(self, question: Question) -> float:
        """Seconds of the objective for all sequences; inf if the model does not fit."""
        if self.decode is None or self.prefill is None:
            return math.inf
        parts = {
            "prefill": question.prompt / self.prefill.tokens,
            "decode": question.generated / self.decode.tokens,
        }
        return question.sequences * parts.get(question.objective, sum(parts.values()))


def answer(question: Question, way: Way) -> Answer:
    """Predicts memory and speed of one way. Raises a UserError if the way is not possible."""
    predictor = Predictor(question, way)
    memory = predictor.memory(question.context, question.sequences)
    if max(one.total for one in memory) > question.cluster.rank_memory:
        return Answer(way, memory, None, None)
    return Answer(way, memory, *_rates(question, predictor))


def _rates(question: Question, predictor: Predictor) -> tuple[Rate, Rate]:
    decode = predictor.decode(question.sequences, question.context)
    return decode, predictor.prefill(question.prompt, prompts=question.sequences)


def answers(question: Question) -> list[Answer]:
    """Predicts all possible ways, the fastest first. Ways that do not fit come last, the least memory first."""
    spec, found = question.checkpoint.spec, []
    mixture = any(isinstance(layer.ffn, MoeFfn) for layer in spec.layers)
    for way in ways_for(question.cluster, len(spec.layers), mixture):
        try:
            found.append(answer(question, way))
            question.report(f"{question.cluster.hosts} x {question.cluster.machine.name}, {way}")
        except UserError:  # this layout is not possible for these ranks
            if way.name == "tensor":
                raise
    return sorted(found, key=lambda one: (one.seconds(question), one.largest.total))


@dataclass(frozen=True)
class Change:
    """The gain from more of a resource."""

    name: str  # the resource
    way: Way  # the way that is used then
    decode: float  # factor on tokens per second
    prefill: float


def changes(question: Question, best: Answer, rows: dict[int, list[Answer]] | None = None) -> Iterator[Change]:
    """The gain of the best way from twice as much of each resource. For hosts, with the best way for more hosts.

    Args:
        rows: Answers by number of hosts, as far as they are known.
    """
    machine, cluster = question.cluster.machine, question.cluster
    memory = replace(machine, bandwidth=MORE * machine.bandwidth)
    cores = replace(machine, cores=int(MORE * machine.cores))
    more = {"memory bandwidth": replace(cluster, machine=memory), "cores": replace(cluster, machine=cores)}
    if cluster.hosts > 1:
        link = replace(machine, link_rate=MORE * machine.link_rate, link_seconds=machine.link_seconds / MORE)
        more["speed of the link"] = replace(cluster, machine=link)
    for name, other in more.items():
        yield _change(name, best.way, _rates(question, Predictor(question.on(other), best.way)), best)
    if MORE * cluster.size <= MAX_RANKS:
        hosts = int(MORE * cluster.hosts)
        then = ((rows or {}).get(hosts) or answers(question.on(replace(cluster, hosts=hosts))))[0]
        yield _change("hosts", then.way, (then.decode, then.prefill), best)


def _change(name: str, way: Way, then: tuple[Rate | None, Rate | None], best: Answer) -> Change:
    """The gain over `best`."""
    times = [a.tokens / b.tokens if a and b else 0.0 for a, b in zip(then, (best.decode, best.prefill), strict=True)]
    return Change(name, way, *times)


def over_hosts(question: Question, most: int, found: Sequence[Answer] | None = None) -> dict[int, list[Answer]]:
    """Number of hosts -> ways from the best on, for 1, 2, 4, ... up to `most` hosts.

    Args:
        found: Answers for the hosts of `question`, if they are known.
    """
    counts = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    known = {question.cluster.hosts: [*found]} if found else {}
    ask = lambda hosts: answers(question.on(replace(question.cluster, hosts=hosts)))
    return {hosts: known.get(hosts) or ask(hosts) for hosts in counts}


def over_users(question: Question, way: Way) -> list[tuple[int, Rate]]:
    """(sequences, rate of decode) for 1, 4, 16, 64 and 256 sequences, as far as their caches fit."""
    predictor, room = Predictor(question, way), question.cluster.rank_memory
    fits = lambda count: max(one.total for one in predictor.memory(question.context, count)) <= room
    return [(count, predictor.decode(count, question.context)) for count in USERS if fits(count)]


def over_types(question: Question) -> list[tuple[str, Answer]]:
    """(type of the matrices, best way) for a model without weights, in types of fewer bits."""
    found = []
    for kind in SMALLER_TYPES:
        checkpoint = describe_config(question.checkpoint.metadata, str(question.checkpoint.path), kind)
        found.append((kind, answers(replace(question, checkpoint=checkpoint, quantize=None, made={}))[0]))
    return found


def hosts_that_fit(question: Question) -> int | None:
    """The smallest power of two of hosts with enough memory, at most 256; None if these are not enough."""
    for hosts in (1 << power for power in range(9)):
        cluster = replace(question.cluster, hosts=hosts)
        if cluster.size > MAX_RANKS:
            break
        memory = Predictor(question.on(cluster), Way("tensor")).memory(question.context, question.sequences)
        if max(one.total for one in memory) <= cluster.rank_memory:
            return hosts
    return None


def context_that_fits(question: Question) -> int:
    """The longest context that fits, in multiples of 1024 tokens, with tensor parallelism; 0: none fits."""
    predictor, room = Predictor(question, Way("tensor")), question.cluster.rank_memory
    low, high = 0, question.context // 1024
    while low < high:
        middle = (low + high + 1) // 2
        fits = max(one.total for one in predictor.memory(1024 * middle, question.sequences)) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return 1024 * low


def serial_share(speedup: float, count: int) -> float:
    """The serial part S of the work, from the speedup of `count` workers: speedup = 1 / (S + (1 - S) / count).

    Amdahl's law (1967).
    """
    return (count / speedup - 1) / (count - 1)


def parameters(checkpoint: Checkpoint) -> tuple[int, int]:
    """(elements of all matrices, elements that a token is multiplied with)."""
    spec = checkpoint.spec
    program = trace(main_forward(spec), spec, SINGLE, Mesh())
    return sum(w.elements for w in program.weights if len(w.dims) > 1), int(active_elements(program))

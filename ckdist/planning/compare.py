"""What a plan answers: of every way to divide a model whether it fits, how fast it is and what bounds it; the best, and
what more hosts, bandwidth, cores or a faster link would bring.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckdist.errors import UserError
from ckdist.layout import SINGLE
from ckdist.mesh import Mesh
from ckdist.models.decoder import main_forward
from ckdist.models.spec import MoeFfn
from ckdist.planning.cluster import MAX_RANKS, Cluster
from ckdist.planning.cost import PRODUCTS
from ckdist.planning.predict import Predictor, Rate, Way, ways_for
from ckdist.planning.rank_memory import RankMemory
from ckdist.program.tracer import trace
from ckdist.weights.checkpoint import Checkpoint

ANSWER = 256  # tokens that are decoded for each prompt, by which ways are compared
MORE = 2.0  # times as much of something


@dataclass(frozen=True)
class Question:
    """A model on a cluster: `sequences` of `context` tokens each, with prompts of `prompt` tokens."""

    checkpoint: Checkpoint
    cluster: Cluster
    context: int
    sequences: int = 1
    prompt: int = 2048
    ubatch_size: int = 512
    quantize: str | None = None
    cache: tuple[str, str] = ("i16", "i16")

    def predictor(self, way: Way) -> Predictor:
        """Of one way. A UserError where there is no such way."""
        return Predictor(self.checkpoint, self.cluster, way, self.ubatch_size, self.quantize, self.cache)

    def on(self, cluster: Cluster) -> "Question":
        """The same of another cluster."""
        return replace(self, cluster=cluster)


@dataclass(frozen=True)
class Answer:
    """Of one way: `memory` of the first rank of each stage, and speeds, None where the model does not fit."""

    way: Way
    memory: list[RankMemory]
    decode: Rate | None
    prefill: Rate | None

    @property
    def fits(self) -> bool:
        """Whether there is memory for it: without, there is no speed."""
        return self.decode is not None

    @property
    def largest(self) -> RankMemory:
        """Of the rank that takes the most."""
        return max(self.memory, key=lambda memory: memory.total)

    def seconds(self, question: Question) -> float:
        """Of all sequences' prompts and answers."""
        if self.decode is None or self.prefill is None:
            return math.inf
        return question.sequences * (question.prompt / self.prefill.tokens + ANSWER / self.decode.tokens)


def answer(question: Question, way: Way) -> Answer:
    """Of one way. A UserError where there is no such way."""
    predictor = question.predictor(way)
    memory = predictor.memory(question.context, question.sequences)
    if max(one.total for one in memory) > question.cluster.rank_memory:
        return Answer(way, memory, None, None)
    return Answer(way, memory, *_rates(question, predictor))


def _rates(question: Question, predictor: Predictor) -> tuple[Rate, Rate]:
    """Of decode and of prompts."""
    decode = predictor.decode(question.sequences, question.context)
    return decode, predictor.prefill(question.prompt, prompts=question.sequences)


def answers(question: Question) -> list[Answer]:
    """Of every way that there is, the fastest first; those that do not fit come last, the least memory first."""
    spec, found = question.checkpoint.spec, []
    mixture = any(isinstance(layer.ffn, MoeFfn) for layer in spec.layers)
    for way in ways_for(question.cluster, len(spec.layers), mixture):
        try:
            found.append(answer(question, way))
        except UserError:  # a layout that these ranks cannot have
            if way.name == "tensor":
                raise
    return sorted(found, key=lambda one: (one.seconds(question), one.largest.total))


@dataclass(frozen=True)
class Change:
    """What more of something brings: the best way then, and times as many tokens per second."""

    name: str
    way: Way
    decode: float
    prefill: float


def changes(question: Question, best: Answer) -> Iterator[Change]:
    """What twice as much of something would bring to the best way; of hosts, with the way that is best there."""
    machine, cluster = question.cluster.machine, question.cluster
    memory = replace(machine, bandwidth=MORE * machine.bandwidth, core_bandwidth=MORE * machine.core_bandwidth)
    cores = replace(machine, cores=int(MORE * machine.cores))
    more = {"memory bandwidth": replace(cluster, machine=memory), "cores": replace(cluster, machine=cores)}
    if cluster.hosts > 1:
        link = replace(machine, link_rate=MORE * machine.link_rate, link_seconds=machine.link_seconds / MORE)
        more["speed of the link"] = replace(cluster, machine=link)
    for name, other in more.items():
        yield _change(name, best.way, _rates(question, question.on(other).predictor(best.way)), best)
    if MORE * cluster.size <= MAX_RANKS:
        then = answers(question.on(replace(cluster, hosts=int(MORE * cluster.hosts))))[0]
        yield _change("hosts", then.way, (then.decode, then.prefill), best)


def _change(name: str, way: Way, then: tuple[Rate | None, Rate | None], best: Answer) -> Change:
    """What is gained against the best way of now."""
    times = [a.tokens / b.tokens if a and b else 0.0 for a, b in zip(then, (best.decode, best.prefill), strict=True)]
    return Change(name, way, *times)


def over_hosts(question: Question, most: int) -> list[tuple[int, Answer]]:
    """The best way on 1, 2, 4 and so on hosts."""
    counts = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return [(hosts, answers(question.on(replace(question.cluster, hosts=hosts)))[0]) for hosts in counts]


def hosts_that_fit(question: Question, most: int = 256) -> int | None:
    """The fewest hosts, a power of two, whose ranks together have memory enough for it; None: not `most` either."""
    for hosts in (1 << power for power in range(most.bit_length())):
        cluster = replace(question.cluster, hosts=hosts)
        if cluster.size > MAX_RANKS:
            break
        memory = question.on(cluster).predictor(Way("tensor")).memory(question.context, question.sequences)
        if max(one.total for one in memory) <= cluster.rank_memory:
            return hosts
    return None


def context_that_fits(question: Question) -> int:
    """The longest context for as many sequences, of whole blocks of 1024 tokens, with tensors divided; 0: none."""
    predictor, room = question.predictor(Way("tensor")), question.cluster.rank_memory
    low, high = 0, question.context // 1024
    while low < high:
        middle = (low + high + 1) // 2
        fits = max(one.total for one in predictor.memory(1024 * middle, question.sequences)) <= room
        low, high = (middle, high) if fits else (low, middle - 1)
    return 1024 * low


def serial_share(speedup: float, count: int) -> float:
    """The part of the work that `count` do not share, if together they are `speedup` times as fast as one: Amdahl's
    law (1967), 1 / (S + (1 - S) / N), for S.
    """
    return (count / speedup - 1) / (count - 1)


def speedup(serial: float, count: int) -> float:
    """How many times faster `count` are than one, if a part of the work is not shared: Amdahl's law (1967)."""
    return 1 / (serial + (1 - serial) / count)


def parameters(checkpoint: Checkpoint) -> tuple[int, int]:
    """Elements of all matrices, and of those that a token is multiplied with."""
    spec = checkpoint.spec
    program = trace(main_forward(spec), spec, SINGLE, Mesh())
    elements = lambda w: math.prod(dim.elements for dim in w.dims)
    used = 0.0
    for instr in program.instrs:
        for w in instr.weights if instr.op in PRODUCTS else ():
            if w is not None and len(w.dims) > 1:
                stack = len(w.dims) > 2
                used += elements(w) * (instr.inputs[1].dims[-1].count / w.dims[0].count if stack else 1.0)
    return sum(elements(w) for w in program.weights if len(w.dims) > 1), int(used)


__all__ = [
    "Answer",
    "Change",
    "Question",
    "answers",
    "changes",
    "context_that_fits",
    "hosts_that_fit",
    "over_hosts",
    "parameters",
    "serial_share",
    "speedup",
]

"""A training in simulated time: one step over dp x tp x pp hosts, and weeks of steps, failures and checkpoints.

A step's passes go in the order of `ckdist.train.one_f_one_b`, each when its stage is free and its rows have come. What
a pass takes is counted from the model's shape: operations over the hosts' rate, and exchanges over their links, none of
which hides behind another. Experts are on every replica, as in `ckdist train`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckdist.comm.transports.link import Link
from ckdist.errors import ConfigError
from ckdist.train.one_f_one_b import Pass, most_waiting, passes

FLOAT = 4  # bytes of a weight, a gradient and a row's element that is exchanged
STATE = 8  # bytes of the optimizer's two moments of a weight
PRODUCT = 2  # bytes of a weight as products read it
# Bytes that a layer keeps of a token for its backward pass, over the hidden size: Korthikanti et al. 2022
# (arXiv:2205.05198), equation 2, without the square of attention, in float32.
ACTIVATION = 68
BACKWARD = 2.0  # times the operations of a forward pass
SUMS_EACH_WAY = 2  # all_reduces of a layer in a pass, tensor-parallel (Shoeybi et al. 2019, arXiv:1909.08053)


@dataclass(frozen=True)
class TrainedModel:
    """A model in numbers: parameters in all, those that a token is multiplied with; layers, hidden size, elements of
    all heads' queries and values (added up over layers).
    """

    parameters: float
    active: float
    layers: int
    hidden: int
    attended: float = 0.0


@dataclass(frozen=True)
class TrainingHost:
    """A host in numbers: operations per second that products reach, bytes of memory and bytes per second of it, bytes
    per second that it writes to where checkpoints lie, and its link to others.
    """

    operations: float
    memory: float
    bandwidth: float
    link: Link
    disk: float = 1e9


@dataclass(frozen=True)
class TrainingMesh:
    """Hosts along each axis."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def check(self, model: TrainedModel) -> None:
        """ConfigError where the model cannot be divided so."""
        if self.pp > model.layers:
            raise ConfigError(f"-pp {self.pp} is more than the {model.layers} layers of the model")

    @property
    def hosts(self) -> int:
        """In all."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True)
class Batches:
    """Of each replica and step: `count` batches of `tokens` tokens, in sequences of `sequence`."""

    count: int
    tokens: int
    sequence: int


@dataclass(frozen=True)
class TrainingCost:
    """What one training takes on its hosts, by parts that add up."""

    model: TrainedModel
    host: TrainingHost
    mesh: TrainingMesh
    batches: Batches

    def __post_init__(self) -> None:
        self.mesh.check(self.model)

    @property
    def weights(self) -> float:
        """Weights of one host."""
        return self.model.parameters / (self.mesh.tp * self.mesh.pp)

    def memory(self) -> dict[str, float]:
        """Bytes of the host that holds the most, which is of the first stage."""
        mesh, model = self.mesh, self.model
        waiting = sum(most_waiting(passes(0, mesh.pp, 1, self.batches.count), 1))
        rows = self.batches.tokens * model.hidden * model.layers / mesh.pp
        return {
            "weights": FLOAT * self.weights,
            "weights of products": PRODUCT * self.weights,
            "gradients": FLOAT * self.weights,
            "optimizer state": STATE * self._state_weights(),
            "activations": ACTIVATION * rows * max(1, waiting) / mesh.tp,
        }

    def _state_weights(self) -> float:
        """Weights whose optimizer state a host has, and writes to a checkpoint: replicas share it."""
        return self.model.parameters / self.mesh.hosts

    def compute(self) -> float:
        """Seconds of the operations of a stage's forward pass."""
        model, tokens = self.model, self.batches.tokens
        # of a token two for each weight, and two for each element of the half of its sequence that it attends to
        operations = 2.0 * tokens * (model.active + model.attended * self.batches.sequence / 2)
        return operations / (self.mesh.tp * self.mesh.pp * self.host.operations)

    def sums(self) -> float:
        """Seconds of the tensor-parallel sums of a stage's forward pass."""
        size = FLOAT * self.batches.tokens * self.model.hidden
        return SUMS_EACH_WAY * self.model.layers / self.mesh.pp * ring(self.host.link, self.mesh.tp, size)

    def hop(self) -> float:
        """Seconds of a batch's rows from a stage to the next."""
        return self.host.link.message(FLOAT * self.batches.tokens * self.model.hidden / self.mesh.tp)

    def gradients(self) -> float:
        """Seconds in which replicas add up their gradients, and share the updated weights."""
        return ring(self.host.link, self.mesh.dp, FLOAT * self.weights)

    def update(self) -> float:
        """Seconds of the optimizer, which reads and writes its weights, gradients and state once."""
        return 2 * (2 * FLOAT + STATE) * self._state_weights() / self.host.bandwidth

    def forward(self) -> float:
        """Seconds of a stage's forward pass."""
        return self.compute() + self.sums()

    def backward(self) -> float:
        """Seconds of its backward pass."""
        return BACKWARD * self.compute() + self.sums()

    def checkpoint(self) -> float:
        """Seconds in which all hosts write weights and state, each its part."""
        return (FLOAT + STATE) * self._state_weights() / self.host.disk

    @property
    def tokens(self) -> int:
        """Of a step, of all replicas."""
        return self.mesh.dp * self.batches.count * self.batches.tokens


def ring(link: Link, ranks: int, size: float) -> float:
    """Seconds of an all_reduce of so many bytes: 2 (n - 1) messages of an n-th each (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) * link.message(size / ranks) if ranks > 1 else 0.0


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds of a step's passes from the first to the last, and those in which a stage computes, on the average."""

    seconds: float
    busy: float

    @property
    def bubble(self) -> float:
        """Waiting over computing."""
        return self.seconds / self.busy - 1


def pipeline(
    stages: int, batches: int, forward: float, backward: float, hop: float, spread: float, rng: np.random.Generator
) -> PipelineTimes:
    """The passes of one replica's step. `spread`: the standard deviation of the logarithm of a pass's seconds."""
    orders = [passes(stage, stages, 1, batches) for stage in range(stages)]
    draw = lambda: math.exp(spread * rng.standard_normal()) if spread else 1.0
    done: dict[tuple[int, bool, int], float] = {}
    at, free, busy = [0] * stages, [0.0] * stages, 0.0
    waiting = list(range(stages))
    while waiting:
        waiting = [stage for stage in waiting if at[stage] < len(orders[stage])]
        for stage in waiting:
            while at[stage] < len(orders[stage]):
                each = orders[stage][at[stage]]
                rows = _rows_come(each, stage, stages, done, hop)
                if rows is None:
                    break
                own = backward + forward * (stage == stages - 1) if each.backward else forward
                own *= draw()
                free[stage] = max(free[stage], rows) + own
                done[stage, each.backward, each.batch] = free[stage]
                busy, at[stage] = busy + own, at[stage] + 1
    return PipelineTimes(max(free), busy / stages)


def _rows_come(
    each: Pass, stage: int, stages: int, done: dict[tuple[int, bool, int], float], hop: float
) -> float | None:
    """When a pass has what it reads; None: not yet known."""
    if each.backward and stage < stages - 1:
        source = stage + 1, True, each.batch
    elif stage:
        source = stage - 1, False, each.batch
    else:
        return 0.0
    return done[source] + hop if source in done else None


@dataclass(frozen=True)
class Reliability:
    """`mtbf`: mean seconds between failures of the whole job (inf: none); `restart`: seconds until it goes on;
    `interval`: seconds of work between two checkpoints, each of which takes `checkpoint` seconds.
    """

    mtbf: float
    restart: float
    checkpoint: float
    interval: float


def best_interval(mtbf: float, checkpoint: float) -> float:
    """Seconds of work between checkpoints: sqrt(2 C M), Young 1974; half of the MTBF at most."""
    return min(math.sqrt(2 * checkpoint * mtbf), mtbf / 2) if math.isfinite(mtbf) else math.inf


@dataclass(frozen=True)
class Weeks:
    """Of a long training: seconds in all and by what they went to, checkpoints, and failures."""

    seconds: float
    useful: float
    lost: float
    writing: float
    down: float
    checkpoints: int
    failures: int

    @property
    def goodput(self) -> float:
        """The part of the time in which steps were made that count."""
        return self.useful / self.seconds if self.seconds else 0.0


def weeks(reliability: Reliability, seconds: float, rng: np.random.Generator) -> Weeks:
    """So many seconds of work, checkpoints, failures at random, and restarts from the last checkpoint."""
    now = useful = lost = writing = down = 0.0
    checkpoints = failures = 0
    failure = rng.exponential(reliability.mtbf) if math.isfinite(reliability.mtbf) else math.inf
    while now < seconds:
        work = min(reliability.interval, seconds - now)
        write = reliability.checkpoint if work == reliability.interval else 0.0
        end = now + work + write
        if failure < min(end, seconds):
            spent = failure - now
            lost, failures = lost + spent, failures + 1
            restart = min(reliability.restart, seconds - failure)
            now, down = failure + restart, down + restart
            failure = now + rng.exponential(reliability.mtbf)
            continue
        checkpoints += write > 0
        useful, writing = useful + work, writing + min(write, seconds - now - work)
        now = min(end, seconds)
    return Weeks(seconds, useful, lost, writing, down, checkpoints, failures)


def step_seconds(cost: TrainingCost, times: Sequence[PipelineTimes]) -> float:
    """Of a step: the slowest replica's passes, the gradients' sum and the update."""
    return max(one.seconds for one in times) + cost.gradients() + cost.update()


__all__ = [
    "Batches", "PipelineTimes", "Reliability", "TrainedModel", "TrainingCost", "TrainingHost", "TrainingMesh", "Weeks",
    "best_interval", "pipeline", "ring", "step_seconds", "weeks",
]  # fmt: skip

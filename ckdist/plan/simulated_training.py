"""A training in simulated time: one step over dp x sp x tp x pp hosts, and weeks of steps, failures and checkpoints.

The passes of a step have the order of `ckdist.train.one_f_one_b`. A pass starts when its stage is free and its rows
have arrived. Its duration follows from the model's shape: operations over the hosts' rate, plus exchanges over their
links. Exchanges overlap with nothing. Experts are on every replica, as in `ckdist train`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckdist.comm.transports.link import Link
from ckdist.errors import ConfigError
from ckdist.plan.machine_spec import MANY, MachineSpec
from ckdist.train.one_f_one_b import Pass, most_waiting, passes

FLOAT = 4  # bytes of a weight, a gradient, or an exchanged element of a row
STATE = 8  # bytes of the optimizer's two moments per weight
PRODUCT = 2  # bytes of a weight in the format that products read
# Bytes per token and element of the hidden size that a layer keeps for its backward pass: Korthikanti et al. 2022
# (arXiv:2205.05198), equation 2, without the quadratic term of attention, in float32.
ACTIVATION = 68
FORWARD, BACKWARD = 1.0, 2.0  # operations of a pass, in those of a forward pass
UNCERTAINTY = 0.5  # share by which predicted seconds may be wrong, either way
# Exchanges of all keys and values of a layer in the backward pass, in those of the forward pass: for the layer that is
# computed again, for its gradient, and the float32 gradients themselves.
BACKWARD_KEYS = 4.0
SUMS_EACH_WAY = 2  # all_reduces of a layer in a pass, tensor-parallel (Shoeybi et al. 2019, arXiv:1909.08053)


@dataclass(frozen=True)
class TrainedModel:
    """A model in numbers."""

    parameters: float  # in all
    active: float  # parameters that a token is multiplied with
    layers: int
    hidden: int
    attended: float = 0.0  # elements of all heads' queries and values, over all layers
    keys: float = 0.0  # elements of a token's keys and values, over all layers


@dataclass(frozen=True)
class TrainingHost:
    """A host in numbers."""

    operations: float  # per second, as products reach them
    memory: float  # bytes
    bandwidth: float  # bytes per second of memory
    link: Link  # to other hosts
    disk: float = 1e9  # bytes per second to the storage of checkpoints
    inner: Link | None = None  # inside a replica; None: as `link`


@dataclass(frozen=True)
class TrainingMesh:
    """The number of hosts along each axis."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1

    def check(self, model: TrainedModel) -> None:
        """Raises ConfigError if the model cannot be divided over the mesh."""
        if self.pp > model.layers:
            raise ConfigError(f"-pp {self.pp} is more than the {model.layers} layers of the model")

    @property
    def hosts(self) -> int:
        """The number of all hosts."""
        return self.dp * self.tp * self.pp * self.sp


@dataclass(frozen=True)
class Batches:
    """The batches of each replica in a step."""

    count: int  # batches
    tokens: int  # tokens of a batch
    sequence: int  # tokens of a sequence


@dataclass(frozen=True)
class TrainingCost:
    """The cost of a training on its hosts, in parts that add up."""

    model: TrainedModel
    host: TrainingHost
    mesh: TrainingMesh
    batches: Batches
    backward_work: float = BACKWARD
    trained: float | None = None  # weights that learn; None: all

    def __post_init__(self) -> None:
        self.mesh.check(self.model)

    @property
    def weights(self) -> float:
        """The number of weights on one host."""
        return self.model.parameters / (self.mesh.tp * self.mesh.pp)

    def memory(self) -> dict[str, float]:
        """Returns the bytes on the host that holds the most. It belongs to the first stage."""
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

    @property
    def _learning(self) -> float:
        """The fraction of the weights that learn."""
        return 1.0 if self.trained is None else self.trained / self.model.parameters

    def _state_weights(self) -> float:
        """Weights whose optimizer state a host holds and writes to a checkpoint. The state is sharded over replicas."""
        return self.model.parameters / self.mesh.hosts

    def compute(self) -> float:
        """Returns the seconds of the operations of a stage's forward pass."""
        model, tokens = self.model, self.batches.tokens
        # Per token: two for each weight, and two for each element of the half of its sequence that it attends to.
        operations = 2.0 * tokens * (model.active + model.attended * self.batches.sequence / 2)
        return operations / (self.mesh.tp * self.mesh.pp * self.mesh.sp * self.host.operations)

    def sums(self) -> float:
        """Returns the seconds of the tensor-parallel sums of a stage's forward pass."""
        size = FLOAT * self.batches.tokens / self.mesh.sp * self.model.hidden
        return (
            SUMS_EACH_WAY
            * self.model.layers
            / self.mesh.pp
            * ring(self.host.inner or self.host.link, self.mesh.tp, size)
        )

    def gathers(self) -> float:
        """Returns the seconds in which ranks that divide a sequence gather its keys and values, forward."""
        mesh, model = self.mesh, self.model
        size = PRODUCT * self.batches.tokens / mesh.sp * model.keys / model.layers / mesh.tp
        return model.layers / mesh.pp * (mesh.sp - 1) * self.host.link.message(size)

    def hop(self) -> float:
        """Returns the seconds of a batch's rows from a stage to the next."""
        return (self.host.inner or self.host.link).message(
            FLOAT * self.batches.tokens * self.model.hidden / (self.mesh.tp * self.mesh.sp)
        )

    def gradients(self) -> float:
        """Returns the seconds in which replicas add up their gradients and exchange the updated weights."""
        return ring(self.host.link, self.mesh.dp * self.mesh.sp, FLOAT * self.weights * self._learning)

    def update(self) -> float:
        """Returns the seconds of the optimizer. It reads and writes weights, gradients and state once."""
        return 2 * (2 * FLOAT + STATE) * self._state_weights() * self._learning / self.host.bandwidth

    def forward(self) -> float:
        """Returns the seconds of a stage's forward pass."""
        return self.compute() + self.sums() + self.gathers()

    def backward(self) -> float:
        """Returns the seconds of a stage's backward pass."""
        return self.backward_work * self.compute() + self.sums() + BACKWARD_KEYS * self.gathers()

    def checkpoint(self) -> float:
        """Returns the seconds of a checkpoint. Every host writes its part of weights and state."""
        return (FLOAT + STATE) * self._state_weights() / self.host.disk

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all replicas."""
        return self.mesh.dp * self.batches.count * self.batches.tokens


def operations_of(machine: MachineSpec) -> float:
    """Operations per second of a host's products of bfloat16 with many rows."""
    return machine.total_cores * machine.product_rate("BF16", 1, MANY)


def ring(link: Link, ranks: int, size: float) -> float:
    """Seconds of an all_reduce: 2 * (ranks - 1) messages of size / ranks bytes (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) * link.message(size / ranks) if ranks > 1 else 0.0


@dataclass(frozen=True)
class PipelineTimes:
    """The times of a step's passes."""

    seconds: float  # from the first pass to the last
    busy: float  # seconds in which a stage computes, on average

    @property
    def bubble(self) -> float:
        """Waiting time over computing time: seconds / busy - 1."""
        return self.seconds / self.busy - 1


def pipeline(
    stages: int, batches: int, forward: float, backward: float, hop: float, spread: float, rng: np.random.Generator
) -> PipelineTimes:
    """Simulates the passes of one replica's step.

    `spread` is the standard deviation of the logarithm of a pass's seconds.
    """
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
    """The time at which a pass's input arrives; None: not yet known."""
    if each.backward and stage < stages - 1:
        source = stage + 1, True, each.batch
    elif stage:
        source = stage - 1, False, each.batch
    else:
        return 0.0
    return done[source] + hop if source in done else None


@dataclass(frozen=True)
class Reliability:
    """Failures and checkpoints of a job."""

    mtbf: float  # mean seconds between failures of the whole job; inf: none
    restart: float  # seconds from a failure until the job goes on
    checkpoint: float  # seconds of one checkpoint
    interval: float  # seconds of work between two checkpoints


def best_interval(mtbf: float, checkpoint: float) -> float:
    """Returns seconds of work between checkpoints: min(sqrt(2 * checkpoint * mtbf), mtbf / 2) (Young 1974)."""
    return min(math.sqrt(2 * checkpoint * mtbf), mtbf / 2) if math.isfinite(mtbf) else math.inf


@dataclass(frozen=True)
class Weeks:
    """The use of time in a long training, in seconds."""

    seconds: float  # in all
    useful: float  # steps that count
    lost: float  # work since the last checkpoint before a failure
    writing: float  # checkpoints
    down: float  # restarts
    checkpoints: int
    failures: int

    @property
    def goodput(self) -> float:
        """Useful time over all time: useful / seconds."""
        return self.useful / self.seconds if self.seconds else 0.0


def weeks(reliability: Reliability, seconds: float, rng: np.random.Generator) -> Weeks:
    """Simulates `seconds` of work, checkpoints, random failures, and restarts from the last checkpoint."""
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
    """Returns the seconds of a step: passes of the slowest replica, sum of gradients, and update."""
    return max(one.seconds for one in times) + cost.gradients() + cost.update()

"""Predicts memory and step time of a training on a described cluster: `ckdist plan --train`.

Memory is that of the lowered steps of a real start (`ckdist.train.training_memory`). Seconds are operations over the
rate of products, and exchanges over the links.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckdist.comm.transports.link import Link
from ckdist.errors import ConfigError, LayoutError
from ckdist.mesh import Mesh
from ckdist.models.spec import ModelSpec
from ckdist.plan import simulated_training as simulated
from ckdist.plan.cluster import Cluster
from ckdist.plan.cost import Times
from ckdist.plan.trained_model import trained_model
from ckdist.program.training_tracer import TrainingTracer
from ckdist.train.data.divided_batch import tokens_of_rank
from ckdist.train.loss_program import lower_model, trace_model, trainable
from ckdist.train.stage import TrainingStage
from ckdist.train.training_memory import rank_bytes
from ckdist.weights.adapter_file import Lora

LORA = Lora(16, 32.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
MOST_MESHES = 256  # limit of the search


@dataclass(frozen=True)
class TrainingAnswer:
    """The prediction for one mesh."""

    mesh: Mesh
    memory: Mapping[str, int]  # bytes of the first rank, by content
    times: Times | None  # of a step; None if it does not fit
    tokens: int  # of a step, over all replicas

    @property
    def total(self) -> int:
        """Bytes of the first rank."""
        return sum(self.memory.values())

    @property
    def rate(self) -> float:
        """Tokens per second; 0 if it does not fit."""
        return self.tokens / self.times.total if self.times else 0.0


class Setup(NamedTuple):
    """The settings of a training that its memory depends on. Those without a comment are as of TrainConfig."""

    method: str  # full or lora
    batches: int = 1  # of one sequence each, in a step of a replica
    optim: str = "adamw"
    zero_stage: int = 1
    weights_dtype: str = "float32"


def training_answers(spec: ModelSpec, cluster: Cluster, tokens: int, setup: Setup) -> list[TrainingAnswer]:
    """Predictions for every possible mesh of the ranks, fastest first. Those that do not fit come last.

    `tokens`: tokens of a step of each replica. Raises ConfigError if the model cannot be trained.
    """
    if setup.zero_stage > 2 and setup.method == "lora":
        raise ConfigError("zero_stage (3) trains all weights: use --zero-stage 2 with --train lora")
    if setup.weights_dtype != "float32" and setup.method == "lora":
        raise ConfigError("weights_dtype (bfloat16) is for all weights: use it with --train full")
    found, problem = [], None
    for mesh in training_meshes(cluster, len(spec.layers)):
        if setup.zero_stage > 1 and mesh.size("pp") > 1:
            continue  # a training refuses it
        try:
            found.append(_answer(spec, cluster, -(-tokens // setup.batches), setup, mesh))
        except (LayoutError, ConfigError) as error:
            problem = problem or error
    if not found:
        raise ConfigError(f"this model cannot be trained: {problem}")
    return sorted(found, key=lambda answer: (-answer.rate, answer.total))


def training_meshes(cluster: Cluster, layers: int) -> list[Mesh]:
    """The meshes of a cluster's ranks in which a replica fills whole hosts or lies within one.

    Its ranks are stages, and divide either tensors or sequences.
    """
    divisors = [n for n in range(1, cluster.size + 1) if cluster.size % n == 0]
    whole = [n for n in divisors if n <= cluster.local_size or n % cluster.local_size == 0]
    meshes = []
    for each in whole:  # ranks of a replica
        stages = [pp for pp in divisors if each % pp == 0 and pp <= layers and each // pp in whole]
        meshes += [Mesh.of_job(cluster.size, 0, pp=pp, tp=each // pp) for pp in stages]
        meshes += [Mesh.of_job(cluster.size, 0, pp=pp, sp=each // pp) for pp in stages if each > pp]
    return meshes[:MOST_MESHES]


def _answer(spec: ModelSpec, cluster: Cluster, tokens: int, setup: Setup, mesh: Mesh) -> TrainingAnswer:
    """The prediction for one mesh with batches of `tokens` tokens. Memory is that of the first stage: there most
    batches wait.
    """
    method, batches, optim, zero_stage, weights_dtype = setup
    tracer = functools.partial(TrainingTracer, low_rank=LORA.low_rank()) if method == "lora" else TrainingTracer
    whole = trace_model(spec, mesh, tracer)
    names = [w.name for w in trainable(whole) if method == "full" or ".lora_" in w.name]
    read = {w.name: w for w in whole.weights}
    chosen = [read[name] for name in names]
    stage = TrainingStage.of(mesh, whole, chosen, 1, batches)
    part = tokens_of_rank(tokens, mesh.size("sp")) if mesh.size("sp") > 1 else tokens
    more = {"stage": stage, "zero_stage": zero_stage, "weights_dtype": weights_dtype}
    program = lower_model(spec, part, "bfloat16", mesh, names, True, tracer, **more)
    threads = max(1, cluster.machine.total_cores // cluster.local_size)
    memory = rank_bytes(optim, program, threads)
    if sum(memory.values()) > cluster.rank_memory:
        return TrainingAnswer(mesh, memory, None, 0)
    trained = sum(w.elements for w in chosen)
    cost = _cost(spec, cluster, mesh, simulated.Batches(batches, tokens, tokens), trained)
    return TrainingAnswer(mesh, memory, _times(cost), tokens * batches * mesh.size("dp"))


def _cost(
    spec: ModelSpec, cluster: Cluster, mesh: Mesh, batches: simulated.Batches, trained: float
) -> simulated.TrainingCost:
    """The cost with a rank in place of each host. The ranks of a replica may share a host's memory."""
    machine, ranks = cluster.machine, cluster.local_size
    size = simulated.TrainingMesh(*(mesh.size(axis) for axis in ("dp", "tp", "pp", "sp")))
    within = size.tp * size.pp * size.sp <= ranks
    near = Link(machine.barrier_seconds(machine.total_cores), machine.rank_rate)
    bandwidth = machine.nodes * machine.bandwidth / ranks
    link = machine.link if cluster.hosts > 1 else near
    inner = near if within else machine.link
    host = simulated.TrainingHost(
        simulated.operations_of(machine) / ranks, cluster.rank_memory, bandwidth, link, inner=inner
    )
    # layers are computed again in the backward pass; a frozen matrix has no gradient of its own
    backward = (
        simulated.BACKWARD + simulated.FORWARD if trained > 0.5 * trained_model(spec).parameters else simulated.BACKWARD
    )
    return simulated.TrainingCost(trained_model(spec), host, size, batches, backward, trained)


def _times(cost: simulated.TrainingCost) -> Times:
    """Seconds of a step, with the bubble of 1F1B: (stages - 1) batches of waiting."""
    count, stages = cost.batches.count, cost.mesh.pp
    batch = cost.forward() + cost.backward() + (2 * cost.hop() if stages > 1 else 0.0)
    exchanged = 2 * cost.sums() + (1 + simulated.BACKWARD_KEYS) * cost.gathers()
    computed = count * (cost.forward() + cost.backward() - exchanged)
    sent = count * (batch - cost.forward() - cost.backward() + exchanged) + cost.gradients()
    return Times(cost.update(), computed, link=sent, latency=(stages - 1) * batch)

"""What a training takes on a cluster that is described, and how long its step will be: for `ckdist plan --train`.

Memory is that of `ckdist.planning.training`, of the lowered steps that a start would run. Seconds are the products of
the loss and its gradients, the sum of gradients over the replicas, and the optimizer's pass over memory.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ckdist.comm.thresholds import Thresholds
from ckdist.errors import ConfigError, LayoutError
from ckdist.mesh import Mesh
from ckdist.models.spec import ModelSpec
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import Times
from ckdist.planning.expert_placement import one_sum
from ckdist.planning.training import training_bytes
from ckdist.program.training_tracer import TrainingTracer
from ckdist.train.loss_program import LossProgram, lower_model, trace_model, trainable
from ckdist.train.optimizer import STATES
from ckdist.weights.adapter_file import Lora
from ckdist.weights.dtypes import BF16, F32

LORA = Lora(16, 32.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
OPTIMIZER_BYTES = 28  # of a trained float32: it, its gradient and two states are read, and it and they are written
ROWS = 256  # of products, whose rate counts


@dataclass(frozen=True)
class TrainingAnswer:
    """Of one mesh: bytes of the first rank by what they hold, and seconds of a step, None where it does not fit."""

    mesh: Mesh
    memory: Mapping[str, int]
    times: Times | None
    tokens: int  # of a step, of all replicas

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.memory.values())

    @property
    def rate(self) -> float:
        """Tokens per second; 0 where it does not fit."""
        return self.tokens / self.times.total if self.times else 0.0


def training_answers(spec: ModelSpec, cluster: Cluster, tokens: int, method: str) -> list[TrainingAnswer]:
    """Of every mesh of replicas and shards that the ranks can be, the fastest first; those that do not fit come last.

    `tokens`: of a step of each replica; `method`: full or lora. ConfigError for a model that cannot be trained.
    """
    sizes = [tp for tp in range(1, cluster.size + 1) if cluster.size % tp == 0]
    sizes = [tp for tp in sizes if tp <= cluster.local_size or tp % cluster.local_size == 0]
    found, problem = [], None
    for tp in sizes:
        try:
            found.append(_answer(spec, cluster, tokens, method, Mesh.of_job(cluster.size, 0, tp=tp)))
        except (LayoutError, ConfigError) as error:
            problem = error
    if not found:
        raise ConfigError(f"this model cannot be trained: {problem}")
    return sorted(found, key=lambda one: (-one.rate, one.total))


def _answer(spec: ModelSpec, cluster: Cluster, tokens: int, method: str, mesh: Mesh) -> TrainingAnswer:
    """Of one mesh."""
    tracer = functools.partial(TrainingTracer, low_rank=LORA.low_rank()) if method == "lora" else TrainingTracer
    names = [w.name for w in trainable(trace_model(spec, mesh, tracer)) if method == "full" or ".lora_" in w.name]
    program = lower_model(spec, tokens, "bfloat16", mesh, names, True, tracer)
    memory = training_bytes(program.lowered, tokens, program.operand_bytes, len(STATES["adamw"]), mesh.size("dp"))
    if sum(memory.values()) > cluster.rank_memory:
        return TrainingAnswer(mesh, memory, None, 0)
    return TrainingAnswer(mesh, memory, _times(program, cluster, mesh, tokens), tokens * mesh.size("dp"))


def _times(program: LossProgram, cluster: Cluster, mesh: Mesh, tokens: int) -> Times:
    """Of a step of one rank."""
    machine, threads = cluster.machine, cluster.places()[0].threads
    kind = BF16 if program.dtype == "bfloat16" else F32
    computed = _operations(program, mesh, tokens) / (threads * machine.product_rate(kind.name, 1, ROWS))
    trained = program.lowered.trained_floats
    hosts, replicas = cluster.hosts, mesh.size("dp")
    exchange = link = 0.0
    if replicas > 1 and mesh.size("tp") < cluster.local_size:
        exchange += 4.0 * trained / min(machine.rank_core_rate * threads, machine.rank_rate)
    if replicas > 1 and hosts > 1:
        share = max(1, cluster.local_size // mesh.size("tp"))  # ranks of a host that send together have one sum
        sent = one_sum(1, trained * cluster.local_size // share, hosts, Thresholds().transport_direct_bytes)
        link += sent.seconds(machine.link)
    if mesh.size("tp") > 1:
        rows = 4.0 * tokens * program.spec.hidden_size
        sums = 4 * len(program.spec.layers)  # of a layer two forward and two backward
        if mesh.size("tp") > cluster.local_size:
            one = one_sum(tokens, program.spec.hidden_size, mesh.size("tp") // cluster.local_size, 0)
            link += sums * one.seconds(machine.link)
        exchange += sums * (machine.rank_seconds + rows / min(machine.rank_core_rate * threads, machine.rank_rate))
    updated = OPTIMIZER_BYTES * trained / replicas / machine.read_rate(threads)
    return Times(updated, computed, exchange, link, machine.between)


def _operations(program: LossProgram, mesh: Mesh, tokens: int) -> float:
    """Of this rank's products, forward, backward, and forward again in each layer: 8 for each token and element of a
    trained matrix, 6 for one that is not (Kaplan et al. 2020, arXiv:2001.08361, section 2.1, and recomputing); of
    experts what a token takes.
    """
    trained, total = {w.name for w in program.trained}, 0.0
    for instr in trace_model(program.spec, mesh).instrs:
        if instr.op == "embed":
            continue
        part = 1.0
        if instr.op == "grouped_experts":
            part = instr.inputs[1].dims[-1].count / instr.weight(0).dims[0].count
        for w in instr.weights:
            if w is not None and len(w.dims) > 1:
                elements = math.prod(dim.local(mesh) for dim in w.dims)
                total += part * elements * tokens * (8 if w.name in trained else 6)
    return total


__all__ = ["TrainingAnswer", "training_answers"]

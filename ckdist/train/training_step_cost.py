"""Predicts the seconds of a training step from a machine's figures.

Sums the costs of products, attention and row steps of all passes, packing of weights, exchanges, and the optimizer.
Operations are counted in the traced loss; rates are the machine's `training` figures. Nothing is measured here.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckdist import native
from ckdist.comm.thresholds import Thresholds
from ckdist.comm.world_protocol import World
from ckdist.mesh import Mesh
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import Times, nominal
from ckdist.planning.expert_placement import one_sum
from ckdist.planning.machine_spec import MachineSpec, kept_machine
from ckdist.planning.machine_speed import machine_title
from ckdist.program.program import Instr
from ckdist.program.training_tracer import TrainingTracer
from ckdist.topology import this_machine
from ckdist.train.loss_program import LossProgram, trace_model
from ckdist.weights.dtypes import BF16, F32

ROWS = 256  # the rate of products of this many rows is used
OPTIMIZER_BYTES = 28  # per trained float32: read it, its gradient and two states; write it and the states
PACK_BYTES = 12  # per float32 of a matrix and batch: read it, and pack it for the forward and the backward pass
GRADIENT_BYTES = 8  # per float32 of a trained matrix and batch: read and write its gradient
# Operations of a step / operations of its forward pass. A product has two gradients, or one if its matrix is frozen.
# Attention's backward pass has five products, its forward pass two (Dao et al. 2022, arXiv:2205.14135).
TRAINED, FROZEN, ATTEND, ELEMENTS = 3.0, 2.0, 3.5, 3.0
PRODUCT_KINDS = ("matmul", "matmul_grad", "weight_grad", "cross_entropy", "grouped_experts", "grouped_experts_grad")
ATTENTION_KINDS = "attend_packed", "attend_grad"
WAITING_KINDS = "reduce_gradients", "all_reduce", "recv_rows", "send_rows", "pack"


@dataclass(frozen=True)
class Work:
    """The work of one rank."""

    products: float = 0.0  # operations of matrix products per token
    attention: float = 0.0  # operations of attention per token
    elements: float = 0.0  # elements of row steps per token
    packed: float = 0.0  # bytes of weights that are packed per batch
    gradients: float = 0.0  # bytes of matrix gradients per batch

    def plus(self, other: "Work") -> "Work":
        """The sum of both."""
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class TrainingStepCost:
    """Predicts the steps of a rank's program."""

    program: LossProgram
    cluster: Cluster
    sequence: int  # tokens of a sequence
    recompute: bool = True  # layers are computed again in the backward pass
    tracer: Callable[..., TrainingTracer] = TrainingTracer  # wrote the program

    @property
    def mesh(self) -> Mesh:
        """The mesh of the job."""
        return self.program.shards.mesh

    @property
    def machine(self) -> MachineSpec:
        """The figures of each host."""
        return self.cluster.machine

    @property
    def threads(self) -> int:
        """Threads of a rank."""
        return self.cluster.places()[0].threads

    @property
    def read_rate(self) -> float:
        """Bytes of weights per second that a rank reads."""
        return self.machine.read_rate(self.threads, self.cluster.local_size)

    @property
    def update_bytes(self) -> float:
        """Bytes that the optimizer reads and writes."""
        return float(OPTIMIZER_BYTES * self.program.lowered.trained_floats)

    def step(self, tokens: int, batches: int = 1) -> Times:
        """Seconds of a step: batches * slowest stage + waiting + exchange and optimizer.

        The slowest stage waits for one batch of each other stage, divided by its chunks. For equal stages this is
        `one_f_one_b.bubble`. `tokens`: tokens of the step of each replica.
        """
        stages = [self._batch(*work, tokens / batches) for work in self.stage_work]
        times = max(stages, key=lambda stage: stage.total)
        waits = (sum(stage.total for stage in stages) - times.total) / len(self.program.stage.chunks)
        done = Times().plus(times, batches)
        return done.plus(self._after()).plus(Times(latency=waits + self.machine.between))

    @functools.cached_property
    def stage_work(self) -> list[tuple[Work, int]]:
        """(work per token, number of layers) of each stage."""
        whole, found = trace_model(self.program.spec, self.mesh, self.tracer), []
        for stage in self.program.stage.all_stages():
            work = Work()
            for chunk in stage.chunks:
                for instr in chunk.program(whole, self.mesh).instrs:
                    work = work.plus(self.work(instr))
            found.append((work, sum(chunk.layers[1] - chunk.layers[0] for chunk in stage.chunks)))
        return found

    def _batch(self, work: Work, layers: int, tokens: float) -> Times:
        """Seconds of the passes of one batch through a stage."""
        machine = self.machine
        kind, form = (BF16, 1) if self.program.dtype == "bfloat16" else (F32, 0)
        rate = machine.product_rate(kind.name, form, ROWS) * machine.training
        computed = work.products / rate + work.attention / (machine.training_attention or machine.attention_rate())
        computed += work.elements / (machine.training_elementwise or machine.elementwise)
        read = (work.packed / machine.training_packing + work.gradients) / self.read_rate
        return Times(read, tokens * computed / self.threads).plus(self._sums(tokens, layers))

    def work(self, instr: Instr) -> Work:
        """Work of an instruction's forward and backward passes, and of its recomputation."""
        again, trained = float(self.recompute), self.program.trained_shards.whole_shapes
        if instr.op == "attend_packed":
            seen = self.sequence / 2 + self.machine.training_keys
            width = instr.inputs[0].dims[1].local(self.mesh) + instr.outputs[0].dims[1].local(self.mesh)
            return Work(attention=(ATTEND + again) * 2.0 * seen * width)
        matrices = [w for w in instr.weights if w is not None and len(w.dims) > 1]
        if not matrices or instr.op == "embed":
            widths = [v.dims[1].local(self.mesh) for v in instr.outputs if len(v.dims) > 1]
            return Work(elements=(ELEMENTS + again) * sum(widths))
        part = instr.inputs[1].dims[-1].count / matrices[0].dims[0].count if instr.op == "grouped_experts" else 1.0
        products = trained_elements = 0.0
        for w in matrices:
            elements = math.prod(dim.local(self.mesh) for dim in w.dims)
            times = (TRAINED if w.name in trained else FROZEN) + again * (instr.op != "cross_entropy")
            products += times * 2.0 * part * elements
            trained_elements += elements * (w.name in trained)
        packed, gradients = PACK_BYTES * trained_elements, GRADIENT_BYTES * trained_elements
        return Work(products=products, packed=packed, gradients=gradients)

    def _sums(self, tokens: float, layers: int) -> Times:
        """Seconds of the tensor-parallel sums of a batch: two forward and two backward per layer."""
        tp, machine = self.mesh.size("tp"), self.machine
        if tp == 1:
            return Times()
        rows, count, link = 4.0 * tokens * self.program.spec.hidden_size, 4 * layers, 0.0
        if tp > self.cluster.local_size:
            one = one_sum(math.ceil(tokens), self.program.spec.hidden_size, tp // self.cluster.local_size, 0)
            link = count * one.seconds(machine.link)
        return Times(exchange=count * (machine.rank_seconds + rows / self._rank_rate), link=link)

    @property
    def _rank_rate(self) -> float:
        """Bytes per second read from other ranks' memory."""
        return min(self.machine.rank_core_rate * self.threads, self.machine.rank_rate)

    def _after(self) -> Times:
        """Seconds of the sum of gradients over replicas, and of the optimizer."""
        machine, local = self.machine, self.cluster.local_size
        trained, replicas = self.program.lowered.trained_floats, self.mesh.size("dp")
        replica_ranks = self.mesh.size("tp") * self.mesh.size("pp")
        exchange = link = 0.0
        if replicas > 1 and replica_ranks < local:
            exchange = 4.0 * trained / self._rank_rate
        if replicas > 1 and self.cluster.hosts > 1:
            share = max(1, local // replica_ranks)  # ranks of a host that send one sum together
            sent = one_sum(1, trained * local // share, self.cluster.hosts, Thresholds().transport_direct_bytes)
            link = sent.seconds(machine.link)
        return Times(self.update_bytes / self.read_rate / machine.training_optimizer, 0.0, exchange, link)


def cluster_of(world: World, threads: int) -> Cluster:
    """The hosts of a job with `threads` threads per rank. Uses this machine's stored figures, else nominal ones."""
    machine = kept_machine(machine_title(this_machine()), native.isa())
    local = max(1, world.local_size)
    if machine is None:
        machine = replace(nominal(native.isa()), cores=threads * local)
    return Cluster(machine, max(1, world.size // local), max(1, threads * local // machine.nodes), local)


__all__ = ["ATTENTION_KINDS", "PRODUCT_KINDS", "WAITING_KINDS", "TrainingStepCost", "Work", "cluster_of"]

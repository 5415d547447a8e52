"""Predicted seconds of a step of a training on a machine in numbers: products, attention and row steps of forward and
backward passes, packing of weights, exchanges, and the optimizer.

What an element takes is counted in the traced loss; rates are those of the machine's `training` figures. It measures
nothing.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckdist import native
from ckdist.comm.protocol import World
from ckdist.comm.thresholds import Thresholds
from ckdist.mesh import Mesh
from ckdist.planning.cluster import Cluster
from ckdist.planning.cost import Times, nominal
from ckdist.planning.expert_placement import one_sum
from ckdist.planning.machine import MachineSpec, kept_machine
from ckdist.planning.machine_speed import machine_title
from ckdist.program.program import Instr
from ckdist.program.training_tracer import TrainingTracer
from ckdist.topology import this_machine
from ckdist.train.loss_program import LossProgram, trace_model
from ckdist.weights.dtypes import BF16, F32

ROWS = 256  # of products, whose rate counts
OPTIMIZER_BYTES = 28  # of a trained float32: it, its gradient and two states are read, and it and they are written
PACK_BYTES = 12  # of a matrix and a batch: a float32 is read and packed for the forward and for the backward pass
GRADIENT_BYTES = 8  # of a trained matrix and a batch: its gradient is read and written
# Times the operations of a forward pass that the passes of a step take: a product has two gradients, one where its
# matrix is not trained; attention's backward pass has five products for its two (Dao et al. 2022, arXiv:2205.14135).
TRAINED, FROZEN, ATTEND, ELEMENTS = 3.0, 2.0, 3.5, 3.0
PRODUCT_KINDS = ("matmul", "matmul_grad", "weight_grad", "cross_entropy", "grouped_experts", "grouped_experts_grad")
ATTENTION_KINDS = "attend_packed", "attend_grad"
WAITING_KINDS = "reduce_gradients", "all_reduce", "recv_rows", "send_rows", "pack"


@dataclass(frozen=True)
class Work:
    """On one rank of a token operations of products and of attention and numbers of row steps, and of a batch bytes of
    weights that are packed and of their gradients.
    """

    products: float = 0.0
    attention: float = 0.0
    elements: float = 0.0
    packed: float = 0.0
    gradients: float = 0.0

    def plus(self, other: "Work") -> "Work":
        """Both."""
        return Work(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class TrainingStepCost:
    """Prices steps of a rank's program. `sequence`: tokens of a sequence; `recompute`: layers are computed again;
    `tracer`: that the program was written with.
    """

    program: LossProgram
    cluster: Cluster
    sequence: int
    recompute: bool = True
    tracer: Callable[..., TrainingTracer] = TrainingTracer

    @property
    def mesh(self) -> Mesh:
        """Of the job."""
        return self.program.shards.mesh

    @property
    def machine(self) -> MachineSpec:
        """Of each host."""
        return self.cluster.machine

    @property
    def threads(self) -> int:
        """Of a rank."""
        return self.cluster.places()[0].threads

    @property
    def read_rate(self) -> float:
        """Bytes of weights per second of a rank."""
        return self.machine.read_rate(self.threads, self.cluster.local_size)

    @property
    def update_bytes(self) -> float:
        """That the optimizer reads and writes."""
        return float(OPTIMIZER_BYTES * self.program.lowered.trained_floats)

    def step(self, tokens: int, batches: int = 1) -> Times:
        """Of a step of `batches` batches of so many tokens in all, of each replica: those of the slowest stage, and
        of each other one a batch in which it waits, as `one_f_one_b.bubble` has it for stages that are alike.
        """
        stages = [self._batch(*stage, tokens / batches) for stage in self.stage_work]
        times = max(stages, key=lambda one: one.total)
        waits = (sum(one.total for one in stages) - times.total) / len(self.program.stage.chunks)
        done = Times().plus(times, batches)
        return done.plus(self._after()).plus(Times(latency=waits + self.machine.between))

    @functools.cached_property
    def stage_work(self) -> list[tuple[Work, int]]:
        """Of each stage the work of a token, and its layers."""
        whole, found = trace_model(self.program.spec, self.mesh, self.tracer), []
        for stage in self.program.stage.all_stages():
            work = Work()
            for chunk in stage.chunks:
                for instr in chunk.program(whole, self.mesh).instrs:
                    work = work.plus(self.work(instr))
            found.append((work, sum(chunk.layers[1] - chunk.layers[0] for chunk in stage.chunks)))
        return found

    def _batch(self, work: Work, layers: int, tokens: float) -> Times:
        """Of one batch's passes through a stage."""
        machine = self.machine
        kind, form = (BF16, 1) if self.program.dtype == "bfloat16" else (F32, 0)
        rate = machine.product_rate(kind.name, form, ROWS) * machine.training
        computed = work.products / rate + work.attention / (machine.training_attention or machine.attention_rate())
        computed += work.elements / (machine.training_elementwise or machine.elementwise)
        read = (work.packed / machine.training_packing + work.gradients) / self.read_rate
        return Times(read, tokens * computed / self.threads).plus(self._sums(tokens, layers))

    def work(self, instr: Instr) -> Work:
        """Of an instruction's forward and backward passes for a token, and the forward pass that is computed again."""
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
        """Tensor-parallel sums of a batch: of a layer two forward and two backward."""
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
        """Bytes per second of other ranks' memory."""
        return min(self.machine.rank_core_rate * self.threads, self.machine.rank_rate)

    def _after(self) -> Times:
        """The sum of gradients over the replicas, and the optimizer."""
        machine, local = self.machine, self.cluster.local_size
        trained, replicas = self.program.lowered.trained_floats, self.mesh.size("dp")
        of_replica = self.mesh.size("tp") * self.mesh.size("pp")
        exchange = link = 0.0
        if replicas > 1 and of_replica < local:
            exchange = 4.0 * trained / self._rank_rate
        if replicas > 1 and self.cluster.hosts > 1:
            share = max(1, local // of_replica)  # ranks of a host that send together have one sum
            sent = one_sum(1, trained * local // share, self.cluster.hosts, Thresholds().transport_direct_bytes)
            link = sent.seconds(machine.link)
        return Times(self.update_bytes / self.read_rate / machine.training_optimizer, 0.0, exchange, link)


def cluster_of(world: World, threads: int) -> Cluster:
    """The hosts of a job whose ranks have so many threads: as this machine was measured before, else nominal."""
    machine = kept_machine(machine_title(this_machine()), native.isa())
    local = max(1, world.local_size)
    if machine is None:
        machine = replace(nominal(native.isa()), cores=threads * local)
    return Cluster(machine, max(1, world.size // local), max(1, threads * local // machine.nodes), local)


__all__ = ["ATTENTION_KINDS", "PRODUCT_KINDS", "WAITING_KINDS", "TrainingStepCost", "Work", "cluster_of"]

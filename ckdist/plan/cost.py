"""Cost model: predicts the seconds of a step of a traced program on a machine, from bytes, operations and exchanges.

It counts the work of one rank: weights and caches that it reads, operations, barriers, and exchanges. Token-parallel
steps also read other ranks' shards, perhaps on other NUMA nodes.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ckdist.comm.thresholds import Thresholds
from ckdist.comm.transports.link import one_sum
from ckdist.layout import Dim
from ckdist.layouts.expert_placement import whole_factor
from ckdist.layouts.rough_cost import ATTENTION, PRODUCTS, attended_width, experts_hit, matrices_of, used_part
from ckdist.mesh import Mesh
from ckdist.plan.machine_spec import MachineSpec
from ckdist.plan.step_shape import Chunks, StepShape
from ckdist.program.cache import attention_cache, cache_bytes, latent_cache
from ckdist.program.program import Instr, Program, Value, Weight
from ckdist.program.step_batch import BLOCK_TOKENS
from ckdist.weights.packed_type import WeightCost

COLLECTIVES = "all_reduce", "all_to_all", "all_gather"
FREE = "send", "recv"  # the caller prices the hops between stages
HEADS_DIMS = "heads", "kv_heads"  # threads divide values with these dimensions by heads
TILE_ROWS = 16  # rows of weights in a tile
REPLICATED_ROWS = 2  # up to this number of rows, each thread norms all of them (kReplicatedRows in native/runtime)
REMOTE = 2.0  # time to read another node's memory, relative to a rank's own
OVERLAP_LOSS = 0.25  # of reading and computing, the fraction of the shorter that is not hidden


@dataclass(frozen=True)
class RankPlace:
    """The place of one rank."""

    host: str
    node: int
    threads: int

    def factor(self, other: "RankPlace") -> float:
        """Time to read the other rank's memory, relative to the time for its own."""
        return 1.0 if other.node == self.node else REMOTE


class Times(NamedTuple):
    """Seconds of a step by resource."""

    bandwidth: float = 0.0  # memory
    arithmetic: float = 0.0
    exchange: float = 0.0  # with other ranks of the host
    link: float = 0.0  # with other hosts
    latency: float = 0.0  # independent of the size of the step

    @property
    def total(self) -> float:
        """The sum of all resources."""
        return sum(self)

    @property
    def bound(self) -> str:
        """The resource with the most seconds."""
        return max(self._fields, key=lambda name: getattr(self, name))

    def plus(self, other: "Times", count: float = 1.0) -> "Times":
        """Returns self + count * other."""
        return Times(*(own + count * more for own, more in zip(self, other, strict=True)))


class ProductPart(NamedTuple):
    """The work of a product with one matrix, or with the experts of a stack that some row uses."""

    cost: WeightCost
    rows: float  # for a stack: mean rows of an expert
    elements: float
    tiles: float  # of TILE_ROWS rows of weights, which threads do not divide

    @property
    def read(self) -> float:
        """Bytes of weights."""
        return self.elements * self.cost.element_bytes

    @property
    def operations(self) -> float:
        """A multiply-add is two."""
        return 2.0 * self.rows * self.elements


class CostModel:
    """Predicts the seconds of one rank's steps of a program.

    Args:
        program: The traced program.
        mesh: The mesh with this rank's coordinates.
        places: The places of all ranks.
        machine: The figures of the machine.
        weight: Name of a matrix -> its cost per element.
        cache: Types of keys and values.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        places: list[RankPlace],
        machine: MachineSpec,
        weight: Callable[[str], WeightCost],
        cache: tuple[str, str],
    ) -> None:
        self.mesh, self.places, self.machine, self.weight, self.cache = mesh, places, machine, weight, cache
        self.own = places[mesh.rank]
        self.neighbours = sum((p.host, p.node) == (self.own.host, self.own.node) for p in places)
        self.direct_bytes = Thresholds().transport_direct_bytes
        self.distinct = self._distinct(program)
        self.step_bytes = functools.lru_cache(maxsize=256)(self._step_bytes)

    def _distinct(self, program: Program) -> list[tuple[Instr, int]]:
        """(instruction, count) for each group of instructions of equal cost."""
        found: dict[tuple[object, ...], list[Instr]] = {}
        for instr in program.instrs:
            dims = tuple(v.dims for v in (*instr.inputs, *instr.outputs))
            weights = tuple((w.dims, self.weight(w.name)) for w in matrices_of(instr)) if instr.op in PRODUCTS else ()
            found.setdefault((instr.op, dims, weights, instr.attrs.get("window", 0)), []).append(instr)
        return [(group[0], len(group)) for group in found.values()]

    def step(self, shape: StepShape) -> Times:
        """The times of one step of the whole program."""
        times = Times(latency=self.machine.between)
        for instr, count in self.distinct:
            times = times.plus(self._times(instr, shape), count)
        return times

    def _times(self, instr: Instr, shape: StepShape) -> Times:
        machine, threads = self.machine, self.own.threads
        if instr.op in PRODUCTS:
            return self._product(instr, shape)
        if instr.op in ATTENTION:
            return self._attend(instr, shape)
        if instr.op in ("delta_rule", "mamba2"):  # per element of a state: four multiply-adds, one read and one write
            size = instr.inputs[0].dims[1].width * instr.inputs[2].dims[1].local(self.mesh)
            computed = 8.0 * shape.tokens * size / (threads * machine.attention)
            return self._overlapped(8.0 * shape.sequences * size, computed, shape)
        if instr.op == "selective_scan":  # an exponential and three multiply-adds
            size = instr.inputs[3].dims[1].elements // 2 * instr.inputs[0].dims[1].local(self.mesh)
            computed = 16.0 * shape.tokens * size / (threads * machine.attention)
            return self._overlapped(8.0 * shape.sequences * size, computed, shape)
        if instr.op in COLLECTIVES:
            return self._exchange(instr, shape)
        if instr.op in FREE:
            return Times()
        floats = sum(self._rows_of_thread(v, shape) * v.dims[1].local(self.mesh) for v in instr.outputs)
        return Times(arithmetic=floats / machine.elementwise)

    def _overlapped(self, read: float, computed: float, shape: StepShape) -> Times:
        """max(read, computed) + OVERLAP_LOSS * min(read, computed), then a barrier of the rank's threads."""
        took = read / self.machine.read_rate(self.own.threads, self.neighbours, self.step_bytes(shape))
        hidden, wait = OVERLAP_LOSS * min(took, computed), self.machine.barrier_seconds(self.own.threads)
        if took >= computed:
            return Times(bandwidth=took, arithmetic=hidden, latency=wait)
        return Times(bandwidth=hidden, arithmetic=computed, latency=wait)

    def _attend(self, instr: Instr, shape: StepShape) -> Times:
        """The times of attention: two products per token with the positions it attends to, and one read of the cache.

        The cache is read once per sequence.
        """
        window, read, computed = instr.attrs.get("window", 0), 0.0, 0.0
        for chunk in shape.chunks:
            read += self._cached(instr, chunk)
            computed += 2.0 * chunk.count * chunk.seen(window) * attended_width(instr, self.mesh)
        return self._overlapped(read, computed / (self.own.threads * self.machine.attention), shape)

    def _cached(self, instr: Instr, chunk: Chunks) -> float:
        """Bytes of the cache that one attention reads for some sequences."""
        heads, keys, *values = (value.dims[1] for value in instr.inputs)
        if "value_width" not in instr.attrs:
            layer = attention_cache(heads, keys, values[0], self.mesh)
        else:
            layer = latent_cache(heads, keys.elements, instr.attrs["value_width"], self.mesh)
        block = cache_bytes(layer, "token", self.cache)
        return chunk.count * chunk.read(instr.attrs.get("window", 0)) * block / BLOCK_TOKENS

    def _product(self, instr: Instr, shape: StepShape) -> Times:
        axis = instr.inputs[0].dims[0].axis
        sources = [self.places[m.rank] for m in self.mesh.along(axis)] if axis else [self.own]
        slower = sum(map(self.own.factor, sources)) / len(sources)
        read = computed = tiles = 0.0
        rate = self.machine.prompt_rate if shape.tokens > shape.outputs else self.machine.product_rate
        for part in self.parts(instr, shape):
            read += slower * part.read
            computed += part.operations / rate(part.cost.kind, part.cost.form, part.rows)
            tiles += part.tiles
        busiest = -(-tiles // self.own.threads)  # tiles of the thread that has most of them
        return self._overlapped(read, computed * busiest / max(tiles, 1.0), shape)

    def parts(self, instr: Instr, shape: StepShape) -> Iterator[ProductPart]:
        """The work of each matrix of a product."""
        rows = self._rows(instr.inputs[0].dims[0], shape)
        for matrix in matrices_of(instr):
            used = used_part(instr, matrix)
            touched = self._touched(used, matrix, rows) if used < 1 else 1.0
            *stack, height, width = (dim.local(self.mesh) for dim in matrix.dims)
            count = touched * math.prod(stack)
            tiles = -(-height // TILE_ROWS) * count
            yield ProductPart(self.weight(matrix.name), rows * used / touched, height * width * count, tiles)

    def _touched(self, used: float, stack: Weight, rows: int) -> float:
        """The fraction of this rank's experts that some row uses.

        If ranks have different experts, that of the rank with the most used experts.
        """
        experts, hit = stack.dims[0], experts_hit(used, rows)
        if experts.axis is None:
            return hit
        return min(1.0, hit * whole_factor(round(used * experts.count) * rows, self.mesh.size(experts.axis)))

    def _step_bytes(self, shape: StepShape) -> float:
        """Bytes of weights and caches that a step reads."""
        read = 0.0
        for instr, count in self.distinct:
            if instr.op in PRODUCTS:
                read += count * sum(part.read for part in self.parts(instr, shape))
            elif instr.op in ATTENTION:
                read += count * sum(self._cached(instr, chunk) for chunk in shape.chunks)
        return read

    def _exchange(self, instr: Instr, shape: StepShape) -> Times:
        """The times of a collective: its ranks of this host meet, and each reads the others' parts."""
        machine, axis = self.machine, instr.attrs["axis"]
        members = [m.rank for m in self.mesh.along(axis)] if axis in self.mesh.axes else [*range(len(self.places))]
        others = [self.places[m] for m in members if m != self.mesh.rank and self.places[m].host == self.own.host]
        values = instr.inputs if instr.op == "all_reduce" else instr.outputs
        floats = sum(self._rows(v.dims[0], shape) * v.dims[1].local(self.mesh) for v in values)
        each = 4.0 * floats / (1 if instr.op == "all_reduce" else len(members))
        seconds = sum(each * self.own.factor(peer) for peer in others) / machine.rank_rate
        if others:
            seconds += machine.barrier_seconds(self.own.threads * (1 + len(others)))
        if instr.op == "all_reduce":
            seconds += len(others) * floats / (self.own.threads * machine.elementwise)
        return Times(exchange=seconds, link=self._between_hosts(instr, shape, {self.places[m].host for m in members}))

    def _between_hosts(self, instr: Instr, shape: StepShape, hosts: set[str]) -> float:
        """Seconds between hosts in a collective: a sum of all rows, or logits that one host gathers."""
        count = len(hosts)
        if count == 1 or instr.op not in ("all_reduce", "all_gather"):
            return 0.0
        first, second = instr.outputs[0].dims
        rows = shape.tokens if first.name == "tokens" else shape.outputs
        if instr.op == "all_gather":
            return self.machine.link.message(4.0 * rows * second.elements * (count - 1) / count)
        return one_sum(rows, second.elements, count, self.direct_bytes).seconds(self.machine.link)

    def _rows_of_thread(self, v: Value, shape: StepShape) -> float:
        """Rows of a value that a thread computes; rows / threads if threads divide heads."""
        rows, threads = self._rows(v.dims[0], shape), self.own.threads
        if v.dims[1].name in HEADS_DIMS:
            return rows / threads
        return max(min(rows, REPLICATED_ROWS), -(-rows // threads))

    def _rows(self, dim: Dim, shape: StepShape) -> int:
        """This rank's rows of a value: its part of the step's tokens, or of the rows of logits."""
        rows = shape.tokens if dim.name == "tokens" else shape.outputs
        return -(-rows // self.mesh.size(dim.axis)) if dim.axis else rows

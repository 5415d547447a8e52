"""Cost model: predicts the seconds of a step of a traced program on a machine, from bytes, operations and exchanges.

It counts operations of the slowest rank, weights read, bytes exchanged, barriers, and work that all ranks repeat.
Token-parallel steps also read other ranks' shards, perhaps on other NUMA nodes. Figures of a machine file give absolute
times. Nominal figures, right within a factor of two and the same at each start, are only for comparisons.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckdist.comm.thresholds import Thresholds
from ckdist.comm.world_protocol import World
from ckdist.layout import Dim
from ckdist.mesh import Mesh
from ckdist.planning.alike_layers import MIXERS, layers_of
from ckdist.planning.expert_placement import experts_hit, one_sum, whole_factor
from ckdist.planning.machine_spec import MachineSpec
from ckdist.planning.reuse import BytesRead, ReadRates, read_rates
from ckdist.planning.step_shape import Chunks, StepShape
from ckdist.program.executable import block_bytes
from ckdist.program.program import Instr, Program, Value, Weight
from ckdist.program.step_batch import BLOCK_TOKENS
from ckdist.topology import Machine, Placement, this_machine
from ckdist.weights.packed_type import WeightCost

# Operations per second of one thread in a product, by kernels and activation format (0 float32, 1 bfloat16, 2 int8).
OPERATIONS = {
    "avx2": (40e9, 40e9, 80e9),
    "avx2_vnni": (40e9, 40e9, 100e9),
    "avx512": (100e9, 100e9, 250e9),
    "avx512_vnni": (100e9, 100e9, 300e9),
    "avx512_bf16": (100e9, 200e9, 300e9),
    "amx": (100e9, 800e9, 1200e9),
}
THREAD_READ = 10e9  # bytes/s of weights that one thread reads from its own NUMA node
NODE_READ = 200e9  # bytes/s of weights that all ranks of a node read together
EXCHANGE = 16e9, 8e9  # bytes/s that a thread reads from another core's cache: with the same L3, with another L3
WIRE, WIRE_SECONDS = 1e9, 30e-6  # between hosts: bytes/s, and seconds per message
PRODUCTS = "linear", "linear_heads", "experts"
COLLECTIVES = "all_reduce", "all_to_all", "all_gather"
PRODUCT, HEADS, EXPERTS, ATTENTION, OTHERS = "products", "heads", "experts", "attention", "rest"
# The group of an instruction, or of the step that it is fused into. Norms of heads belong to attention. All others are
# OTHERS, including sums over ranks: the norms and residuals after them wait for the summands and add them.
GROUP_OF = {
    "linear": PRODUCT, "gated": PRODUCT, "linear_heads": HEADS, "experts": EXPERTS, "route": EXPERTS,
    **dict.fromkeys((*MIXERS, "rope", "norm_latent"), ATTENTION),
}  # fmt: skip
LOCAL = 10  # NUMA distance of a node to itself
HEADS_DIMS = "heads", "kv_heads"  # threads divide values with these dimensions by heads
REPLICATED_ROWS = 2  # up to this number of rows, each thread norms all of them (kReplicatedRows in native/runtime)
CACHE_TYPES = "i16", "i16"  # types of keys and values


def nominal(isa: str) -> MachineSpec:
    """A server with nominal figures and kernels of level `isa`. An unknown level has the figures of AVX2."""
    f32, bf16, int8 = OPERATIONS.get(isa, OPERATIONS["avx2"])
    return MachineSpec(
        name="nominal", isa=isa, uncertainty=1.0, cores=1, memory=1 << 40, bandwidth=NODE_READ, achieved_bandwidth=1.0,
        core_bandwidth=THREAD_READ, f32=f32, bf16=bf16, int8=int8, achieved_arithmetic=1.0, barrier=0.0, between=0.0,
        rank_core_rate=EXCHANGE[1], link_seconds=WIRE_SECONDS, link_rate=WIRE,
    )  # fmt: skip


@dataclass(frozen=True)
class RankPlace:
    """The place of one rank."""

    host: str
    node: int
    l3: int
    threads: int
    distances: Mapping[int, int]  # from its NUMA node to each node of the host, by the firmware (10 is local)

    def factor(self, other: "RankPlace") -> float:
        """Time to read the other rank's memory, relative to the time for its own."""
        return max(1.0, self.distances.get(other.node, LOCAL if other.node == self.node else 2 * LOCAL) / LOCAL)


def place_of(machine: Machine, host: str, placement: Placement, threads: int) -> RankPlace:
    """The place of a rank with this placement and `threads` threads."""
    cpu = machine.by_number.get((placement.cpus or placement.share or (-1,))[0])
    distances = {node.number: machine.distance(placement.node, node.number) for node in machine.nodes}
    return RankPlace(host, placement.node, cpu.l3 if cpu else -1, threads, distances)


def rank_places(world: World, placement: Placement, threads: int) -> list[RankPlace]:
    """The places of all ranks, in order. A collective call. `threads`: this rank's, for steps with prompts."""
    own = place_of(this_machine(), world.hosts[world.rank], placement, threads)
    return [RankPlace(*row) for row in world.gather([own.host, own.node, own.l3, own.threads, dict(own.distances)])]


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


class CostModel:
    """Predicts the seconds of one rank's steps of a program, and of its layers. If layers differ, of their mean.

    Args:
        program: The traced program.
        mesh: The mesh with this rank's coordinates.
        places: The places of all ranks.
        machine: The figures of the machine.
        weight: Name of a matrix -> its cost per element.
        cache: Types of keys and values.
        shared_choices: Fraction of a token's experts that other tokens of the step have chosen too, beyond chance.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        places: list[RankPlace],
        machine: MachineSpec,
        weight: Callable[[str], WeightCost],
        cache: tuple[str, str] = CACHE_TYPES,
        shared_choices: float = 0.0,
    ) -> None:
        self.layers, self.mesh, self.places, self.weight = layers_of(program), mesh, places, weight
        self.own, self.machine, self.cache, self.shared_choices = places[mesh.rank], machine, cache, shared_choices
        self.neighbours = sum((p.host, p.node) == (self.own.host, self.own.node) for p in places)
        self.direct_bytes = Thresholds().transport_direct_bytes
        self.rates: dict[StepShape, ReadRates] = {}
        self.read: dict[StepShape, BytesRead] = {}  # independent of the machine
        self.distinct = self._distinct(program)

    def _distinct(self, program: Program) -> list[tuple[Instr, int]]:
        """(instruction, count) for each group of instructions of equal cost."""
        found: dict[tuple[object, ...], list[Instr]] = {}
        for instr in program.instrs:
            dims = tuple(v.dims for v in (*instr.inputs, *instr.outputs))
            weights = tuple((w.dims, self.weight(w.name)) for w in matrices_of(instr)) if instr.op in PRODUCTS else ()
            found.setdefault((instr.op, dims, weights, instr.attrs.get("window", 0)), []).append(instr)
        return [(group[0], len(group)) for group in found.values()]

    @property
    def mixture(self) -> bool:
        """Whether a layer has experts."""
        return any(instr.op == "experts" for instr, _ in self.distinct)

    def on(self, machine: MachineSpec) -> "CostModel":
        """The same program on another machine."""
        other = copy.copy(self)
        other.machine, other.rates = machine, {}
        return other

    def step(self, shape: StepShape) -> Times:
        """The times of one step of the whole program."""
        times = Times(latency=self._between(shape))
        for instr, count in self.distinct:
            times = times.plus(self._times(instr, shape), count)
        return times

    def _between(self, shape: StepShape) -> float:
        """Seconds between two steps. The more a step reads, the more of Python's data it evicts from the caches."""
        machine, read = self.machine, self.bytes_read(shape)
        touched = read.always + sum(
            size * experts_hit(used, shape.tokens, self.shared_choices) for used, size in read.stacks.items()
        )
        return machine.between_steps(touched * self.neighbours)

    def groups(self, shape: StepShape) -> dict[str, float]:
        """Seconds of a step by group."""
        names = dict.fromkeys(group_of(instr) for instr, _ in self.distinct)
        return {name: self.group_seconds(shape, name) for name in names}

    def group_seconds(self, shape: StepShape, group: str) -> float:
        """Seconds of a step in one group."""
        own = ((instr, count) for instr, count in self.distinct if group_of(instr) == group)
        return sum(count * self._times(instr, shape).total for instr, count in own)

    def seconds(self, tokens: int) -> float:
        """Seconds of one layer in a step with `tokens` tokens of one prompt without context."""
        shape = StepShape.prompt(tokens)
        return self._mean(lambda layer: sum(self._times(instr, shape).total for instr in layer))

    def seconds_between_boundaries(self, program: Program, tokens: int) -> list[float]:
        """Seconds up to the program's first boundary, between consecutive boundaries, and after the last one."""
        ends, found, shape = {v.name for v in program.boundaries}, [0.0], StepShape.prompt(tokens)
        for instr in program.instrs:
            found[-1] += self._times(instr, shape).total
            found += [0.0] * any(v.name in ends for v in instr.outputs)
        return found

    def relative(self, tokens: int) -> float:
        """Seconds of the mean layer / seconds of the first layer."""
        first = sum(self._times(instr, StepShape.prompt(tokens)).total for instr in self.layers[0][0])
        return self.seconds(tokens) / first

    def _mean(self, price: Callable[[tuple[Instr, ...]], float]) -> float:
        """The mean price over all layers. Layers of equal cost are priced once."""
        if len(self.layers) == 1:
            return price(self.layers[0][0])
        return sum(count * price(layer) for layer, count in self.layers) / sum(count for _, count in self.layers)

    def moved(self, tokens: int) -> float:
        """Bytes of other ranks' activations that this rank reads in a layer."""
        shape = StepShape.prompt(tokens)
        return self._mean(lambda layer: sum(count for instr in layer for _, count in self._reads(instr, shape)))

    def weights_moved(self) -> float:
        """Bytes of other ranks' weights that this rank reads in a layer, for any number of tokens.

        If tokens are sharded: all of each matrix except its own shard. Else 0.
        """
        return self._mean(lambda layer: sum(map(self._weights_read, layer)))

    def _weights_read(self, instr: Instr) -> float:
        """Bytes of other ranks' weights that one instruction reads."""
        rows = instr.inputs[0].dims[0]
        if instr.op not in ("linear", "experts") or not rows.axis:
            return 0.0
        others = 1 - 1 / self.mesh.size(rows.axis)
        return sum(self._elements(w) * self.weight(w.name).element_bytes * others for w in matrices_of(instr))

    def _elements(self, w: Weight) -> int:
        """Elements of this rank's shard of a matrix or a stack."""
        return math.prod(dim.local(self.mesh) for dim in w.dims)

    def _times(self, instr: Instr, shape: StepShape) -> Times:
        """The times of one instruction."""
        machine, threads = self.machine, self.own.threads
        match instr.op:
            case "linear" | "linear_heads" | "experts":
                return self._product(instr, shape)
            case "attend" | "attend_latent":
                return self._attend(instr, shape)
            case "delta_rule":  # per element of a state: four multiply-adds, one read and one write
                keys, values = instr.inputs[0].dims[1].width, instr.inputs[2].dims[1].local(self.mesh)
                computed = 8.0 * shape.tokens * keys * values / (threads * machine.attention_rate())
                read = 8.0 * shape.sequences * keys * values
                return self._overlapped(read / self._read_rates(shape).always, computed)
            case "all_reduce" | "all_to_all" | "all_gather":
                return self._exchange(instr, shape)
            case "send" | "recv":  # the caller prices these, since it knows the hosts of the stages
                return Times()
        if group_of(instr) == ATTENTION:  # included in the figures of attention
            return Times()
        floats = sum(self._rows_of_thread(v, shape) * v.dims[1].local(self.mesh) for v in instr.outputs)
        return Times(arithmetic=floats / machine.elementwise)

    def _overlapped(self, read: float, computed: float) -> Times:
        """The times of an operation that reads and computes at once, then waits for the rank's other threads."""
        return _hidden(read, computed, self.machine.overlap_loss).plus(self._waits())

    def _waits(self) -> Times:
        """The times of a barrier of the rank's threads."""
        return Times(latency=self.machine.barrier if self.own.threads > 1 else 0.0)

    def _attend(self, instr: Instr, shape: StepShape) -> Times:
        """The times of attention: two products per token with the positions it attends to, and one read of the cache.

        The cache is read once per sequence. For single tokens, the cost per token and per layer matters too: the
        numbers of inputs and outputs.
        """
        machine, threads, window = self.machine, self.own.threads, instr.attrs.get("window", 0)
        queries, outputs = instr.inputs[0].dims[1], instr.outputs[0].dims[1]
        widths, latent = queries.local(self.mesh) + outputs.local(self.mesh), instr.op == "attend_latent"
        given = sum(v.dims[1].local(self.mesh) for v in (*instr.inputs, *instr.outputs))
        heads, once = queries.local(self.mesh) / queries.width, 0.0
        times = self._waits()
        for chunk in shape.chunks:
            read, single = self._cache_of(instr, chunk) / self._read_rates(shape).always, chunk.tokens == 1
            computed = 2.0 * chunk.count * chunk.seen(window) * widths / machine.attention_rate(latent, single)
            if single:
                read /= machine.attention_read
                each = chunk.count * given / (threads * machine.token_rate(latent))
                times, once = times.plus(Times(arithmetic=each)), machine.attention_start(latent)
            elif machine.attention_scores and not latent:
                computed += chunk.count * chunk.seen(window) * heads / machine.attention_scores
            times = times.plus(_hidden(read, computed / threads, machine.overlap_loss))
        return times.plus(Times(latency=once))

    def cache_read(self, shape: StepShape) -> float:
        """Bytes of the cache that a step reads."""
        attends = [(instr, count) for instr, count in self.distinct if instr.op in ("attend", "attend_latent")]
        return sum(count * self._cache_read(instr, shape) for instr, count in attends)

    def _cache_read(self, instr: Instr, shape: StepShape) -> float:
        """Bytes of the cache that one attention reads."""
        return sum(self._cache_of(instr, chunk) for chunk in shape.chunks)

    def _cache_of(self, instr: Instr, chunk: Chunks) -> float:
        """Bytes of the cache that one attention reads for some sequences."""
        return chunk.count * chunk.read(instr.attrs.get("window", 0)) * self._cached(instr)

    def _cached(self, instr: Instr) -> float:
        """Bytes of the cache per position that one attention reads."""
        keys = instr.inputs[1].dims[1]
        begin, end = keys.share(self.mesh)
        types, latent = self.cache, instr.op == "attend_latent"
        width = instr.outputs[0].dims[1].width if latent else instr.inputs[2].dims[1].width
        return (
            (end - begin)
            * block_bytes(types[0], types[0] if latent else types[1], keys.width, width, latent)
            / (BLOCK_TOKENS)
        )

    def _product(self, instr: Instr, shape: StepShape) -> Times:
        """The times of a product. For experts, only those that some row uses."""
        axis = instr.inputs[0].dims[0].axis
        sources = [self.places[m.rank] for m in self.mesh.along(axis)] if axis else [self.own]
        slower = sum(map(self.own.factor, sources)) / len(sources)
        machine, computed, read, given, most = self.machine, 0.0, 0.0, 0.0, 1.0
        for cost, each, elements, used in self._parts(instr, shape):
            rate = machine.product_rate(cost.kind, cost.form, each)
            rate *= machine.experts_share(cost.form) if instr.op == "experts" else 1.0
            computed, most = computed + 2.0 * each * elements / (self.own.threads * rate), max(most, each)
            read += slower * elements * cost.element_bytes / self._read_rates(shape).of(used)
            if instr.op == "linear_heads":  # small products: the numbers of inputs and outputs matter too
                widths = instr.inputs[0].dims[1].local(self.mesh) + instr.outputs[0].dims[1].local(self.mesh)
                given = each * widths / (self.own.threads * machine.heads_rate(cost.form))
                heads = matrices_of(instr)[0].dims[0]
                given += heads.local(self.mesh) / heads.width * machine.heads_once / self.own.threads
        if instr.op == "experts":
            given = self._experts(instr, shape) * machine.experts_once / self.own.threads
        times = _hidden(read, computed, machine.product_loss(most)).plus(self._waits())
        return times.plus(Times(arithmetic=given))

    def _read_rates(self, shape: StepShape) -> ReadRates:
        """The read rates of this rank in a series of steps like this one."""
        if shape not in self.rates:
            machine, threads = self.machine, self.own.threads
            rate = lambda between: machine.read_rate(threads, self.neighbours, between)
            hit = lambda used, steps: experts_hit(used, steps * shape.tokens, self.shared_choices)
            reach = machine.reuse[-1][0] / self.neighbours if machine.reuse else 0.0
            self.rates[shape] = read_rates(self.bytes_read(shape), hit, rate, reach)
        return self.rates[shape]

    def bytes_read(self, shape: StepShape) -> BytesRead:
        """Bytes of matrices, caches and states that a step reads."""
        if shape not in self.read:
            self.read[shape] = self._bytes_read(shape)
        return self.read[shape]

    def _bytes_read(self, shape: StepShape) -> BytesRead:
        always, stacks = 0.0, dict[float, float]()
        for instr, count in self.distinct:
            if instr.op in PRODUCTS:
                for matrix in matrices_of(instr):
                    size = count * self._elements(matrix) * self.weight(matrix.name).element_bytes
                    if (used := _used(instr, matrix)) is None:
                        always += size
                    else:
                        stacks[used] = stacks.get(used, 0.0) + size
            elif instr.op in ("attend", "attend_latent"):
                always += count * self._cache_read(instr, shape)
        return BytesRead(always, stacks)

    def product_work(self, instr: Instr, shape: StepShape) -> tuple[float, float]:
        """(operations, bytes of weights read) of a product."""
        parts = list(self._parts(instr, shape))
        operations = sum(2.0 * each * elements for _, each, elements, _ in parts)
        return operations, sum(elements * cost.element_bytes for cost, _, elements, _ in parts)

    def product_seconds(self, instr: Instr, shape: StepShape) -> float:
        """Seconds of a product's operations on one core, without reading its weights."""
        rate = lambda cost, rows: self.machine.product_rate(cost.kind, cost.form, rows)
        return sum(2.0 * each * size / rate(cost, each) for cost, each, size, _ in self._parts(instr, shape))

    def _parts(self, instr: Instr, shape: StepShape) -> Iterator[tuple[WeightCost, float, float, float | None]]:
        """(cost per element, rows, elements, None) for each matrix of a product.

        For a stack: mean rows per expert, elements of experts that some row uses, fraction of experts per row.
        """
        rows = self._rows(instr.inputs[0].dims[0], shape)
        for matrix in matrices_of(instr):
            elements, each = float(self._elements(matrix)), float(rows)
            if (used := _used(instr, matrix)) is not None:
                touched = self._touched(used, matrix, rows)
                each *= used / touched
                elements *= touched
            yield self.weight(matrix.name), each, elements, used

    def _experts(self, instr: Instr, shape: StepShape) -> float:
        """The number of this rank's experts that some row uses."""
        stack = matrices_of(instr)[0]
        touched = self._touched(_used(instr, stack) or 0.0, stack, self._rows(instr.inputs[0].dims[0], shape))
        return touched * stack.dims[0].local(self.mesh)

    def _touched(self, used: float, stack: Weight, rows: int) -> float:
        """The fraction of this rank's experts that some row uses.

        If ranks have different experts, that of the rank with the most used experts.
        """
        experts = stack.dims[0]
        hit = experts_hit(used, rows, self.shared_choices)
        if experts.axis is None:
            return hit
        return min(1.0, hit * whole_factor(round(used * experts.count) * rows, self.mesh.size(experts.axis)))

    def _exchange(self, instr: Instr, shape: StepShape) -> Times:
        """The times of a collective."""
        machine, reads = self.machine, self._reads(instr, shape)
        seconds = machine.rank_seconds * max((self.own.factor(peer) for peer, _ in reads), default=0.0)
        for peer, count in reads:
            near = peer.l3 == self.own.l3 and peer.node == self.own.node
            each = machine.rank_core_rate * (EXCHANGE[0] / EXCHANGE[1] if near else 1.0)
            seconds += count * self.own.factor(peer) / min(each * self.own.threads, machine.rank_rate)
        if instr.op == "all_reduce":
            seconds += sum(count for _, count in reads) / 4 / (self.own.threads * machine.elementwise)
        return Times(exchange=seconds, link=self._between_hosts(instr, shape))

    def _between_hosts(self, instr: Instr, shape: StepShape) -> float:
        """Seconds between hosts in a collective: a sum of all rows, or logits that one host gathers."""
        hosts = len({self.places[m].host for m in self._members(instr)})
        if hosts == 1 or instr.op not in ("all_reduce", "all_gather"):
            return 0.0
        first, second = instr.outputs[0].dims
        rows = shape.tokens if first.name == "tokens" else shape.outputs
        if instr.op == "all_gather":
            return self.machine.link.message(4.0 * rows * second.elements * (hosts - 1) / hosts)
        return one_sum(rows, second.elements, hosts, self.direct_bytes).seconds(self.machine.link)

    def _reads(self, instr: Instr, shape: StepShape) -> list[tuple[RankPlace, float]]:
        """(place, bytes) that a collective reads from each other rank of this host."""
        if instr.op not in COLLECTIVES:
            return []
        members = self._members(instr)
        values = instr.inputs if instr.op == "all_reduce" else instr.outputs
        floats = sum(self._rows(v.dims[0], shape) * v.dims[1].local(self.mesh) for v in values)
        each = floats * 4 / (1 if instr.op == "all_reduce" else len(members))
        return [(self.places[m], each) for m in members if m != self.mesh.rank and self.places[m].host == self.own.host]

    def _members(self, instr: Instr) -> list[int]:
        """The ranks of a collective."""
        axis = instr.attrs["axis"]
        return [m.rank for m in self.mesh.along(axis)] if axis in self.mesh.axes else list(range(len(self.places)))

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


def _hidden(read: float, computed: float, loss: float) -> Times:
    """max(read, computed) + loss * min(read, computed): reading and computing overlap, except for the loss."""
    hidden = loss * min(read, computed)
    return Times(read, hidden) if read >= computed else Times(hidden, computed)


def group_of(instr: Instr) -> str:
    """The group of an instruction."""
    if instr.op == "rms_norm" and instr.outputs[0].dims[1].name in HEADS_DIMS:
        return ATTENTION
    return GROUP_OF.get(instr.op, OTHERS)


def _used(instr: Instr, matrix: Weight) -> float | None:
    """The fraction of a stack of experts that a row uses; None for other matrices."""
    return instr.inputs[1].dims[-1].count / matrix.dims[0].count if len(matrix.dims) > 2 else None


def matrices_of(instr: Instr) -> list[Weight]:
    """The weights of an instruction without its vectors."""
    return [w for w in instr.weights if w is not None and len(w.dims) > 1]


__all__ = [
    "Chunks",
    "CostModel",
    "RankPlace",
    "StepShape",
    "Times",
    "matrices_of",
    "nominal",
    "place_of",
    "rank_places",
]

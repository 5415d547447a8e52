"""Predicted seconds of one layer of a prefill step, from a traced program and nominal figures of the machine.

Nothing here is measured, so the same start always gets the same prediction. The figures are those of server cores, good
to a factor of two; they price what differs between token-parallel and tensor-parallel: operations of the slowest rank,
weights read (token-parallel reads other ranks' shards, which may lie on other NUMA nodes), bytes exchanged, barriers
and what every rank repeats. It chooses nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ckdist.comm.protocol import World
from ckdist.layout import Dim
from ckdist.mesh import Mesh
from ckdist.program.program import Instr, Program, Weight
from ckdist.topology import Machine, Placement, this_machine

# Operations per second of one thread in a product, by kernels and activation format (0 float32, 1 bfloat16, 2 int8).
OPERATIONS = {
    "avx2": (40e9, 40e9, 80e9),
    "avx2_vnni": (40e9, 40e9, 100e9),
    "avx512": (100e9, 100e9, 250e9),
    "avx512_vnni": (100e9, 100e9, 300e9),
    "avx512_bf16": (100e9, 200e9, 300e9),
    "amx": (100e9, 800e9, 1200e9),
}
LEAST_ROWS = 8  # of a product: fewer take as long, for the weights are unpacked all the same
ELEMENTWISE = 4e9  # floats per second of one thread in norms, gates, rotations and sums
THREAD_READ = 10e9  # bytes per second of weights that one thread reads from its own NUMA node,
NODE_READ = 200e9  # and that all ranks of a node read together
OVERLAP_LOSS = 0.25  # of the shorter of reading and computing is not hidden by the longer
EXCHANGE = 16e9, 8e9  # bytes per second of one thread from another core's cache: below the same L3, and below another
MOST_EXCHANGE = 50e9  # of one rank
BARRIER = 2e-6  # seconds
WIRE, WIRE_SECONDS = 1e9, 30e-6  # between hosts: bytes per second, and seconds of one message
MIXERS = "attend", "attend_latent", "delta_rule"
LOCAL = 10  # NUMA distance of a node to itself


@dataclass(frozen=True)
class RankPlace:
    """Where one rank computes. `distances`: from its NUMA node to every node of its host, as the firmware gives them
    (10 is local).
    """

    host: str
    node: int
    l3: int
    threads: int
    distances: Mapping[int, int]

    def factor(self, other: "RankPlace") -> float:
        """How many times longer reading the other rank's memory takes than reading its own."""
        return max(1.0, self.distances.get(other.node, LOCAL if other.node == self.node else 2 * LOCAL) / LOCAL)


def place_of(machine: Machine, host: str, placement: Placement, threads: int) -> RankPlace:
    """Where a rank with this placement computes, with so many threads."""
    cpu = machine.by_number.get((placement.cpus or placement.share or (-1,))[0])
    distances = {node.number: machine.distance(placement.node, node.number) for node in machine.nodes}
    return RankPlace(host, placement.node, cpu.l3 if cpu else -1, threads, distances)


def rank_places(world: World, placement: Placement, threads: int) -> list[RankPlace]:
    """Of all ranks, in their order; a collective call. `threads`: of this one, with prompts."""
    own = place_of(this_machine(), world.hosts[world.rank], placement, threads)
    return [RankPlace(*row) for row in world.gather([own.host, own.node, own.l3, own.threads, dict(own.distances)])]


class LayerModel:
    """Prices one rank's layer of a program: where layers differ, their mean.

    `places`: of all ranks, `mesh` has this one's rank. `weight(name)`: bytes per element of a matrix and the activation
    format it is multiplied with.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        places: list[RankPlace],
        isa: str,
        weight: Callable[[str], tuple[float, int]],
    ) -> None:
        self.layers, self.mesh, self.places, self.weight = layers_of(program), mesh, places, weight
        self.own = places[mesh.rank]
        self.operations = OPERATIONS.get(isa, OPERATIONS["avx2"])
        self.neighbours = sum((p.host, p.node) == (self.own.host, self.own.node) for p in places)

    def seconds(self, tokens: int) -> float:
        """Of one layer of a step with `tokens` tokens of one prompt and no context before them."""
        return self._mean(lambda layer: sum(self._seconds(instr, tokens) for instr in layer))

    def seconds_between_boundaries(self, program: Program, tokens: int) -> list[float]:
        """Of the instructions up to a program's first boundary, from each boundary to the next, and behind the last."""
        ends, found = {v.name for v in program.boundaries}, [0.0]
        for instr in program.instrs:
            found[-1] += self._seconds(instr, tokens)
            found += [0.0] * any(v.name in ends for v in instr.outputs)
        return found

    def relative(self, tokens: int) -> float:
        """How many times longer than the first layer a layer takes, in the mean."""
        first = sum(self._seconds(instr, tokens) for instr in self.layers[0][0])
        return self.seconds(tokens) / first

    def _mean(self, price: Callable[[tuple[Instr, ...]], float]) -> float:
        """The mean over the layers; of layers that are alike the price of one."""
        if len(self.layers) == 1:
            return price(self.layers[0][0])
        return sum(count * price(layer) for layer, count in self.layers) / sum(count for _, count in self.layers)

    def moved(self, tokens: int) -> float:
        """Bytes that this rank reads of other ranks' activations."""
        return self._mean(lambda layer: sum(count for instr in layer for _, count in self._reads(instr, tokens)))

    def weights_moved(self) -> float:
        """Bytes that this rank reads of other ranks' weights in a layer, whatever the number of tokens: where tokens
        are sharded, all of each matrix but its own share.
        """
        return self._mean(lambda layer: sum(map(self._weights_read, layer)))

    def _weights_read(self, instr: Instr) -> float:
        """Bytes of other ranks' weights that one instruction reads."""
        rows = instr.inputs[0].dims[0]
        if instr.op not in ("linear", "experts") or not rows.axis:
            return 0.0
        others = 1 - 1 / self.mesh.size(rows.axis)
        return sum(self._elements(w) * self.weight(w.name)[0] * others for w in _matrices(instr))

    def _elements(self, w: Weight) -> int:
        """Of this rank's part of a matrix, or of a stack."""
        return math.prod(dim.local(self.mesh) for dim in w.dims)

    def _seconds(self, instr: Instr, tokens: int) -> float:
        """Of one instruction."""
        threads = self.own.threads
        match instr.op:
            case "linear" | "linear_heads" | "experts":
                return self._product(instr, tokens)
            case "attend":
                heads = instr.inputs[0].dims[1].local(self.mesh)
                return (
                    2.0 * tokens * tokens * heads / (threads * self.operations[0])
                )  # half of the square, two products
            case "attend_latent":
                widths = instr.inputs[0].dims[1].local(self.mesh) + instr.outputs[0].dims[1].local(self.mesh)
                return 1.0 * tokens * tokens * widths / (threads * self.operations[0])
            case "delta_rule":  # of each state four operations of two
                keys, values = instr.inputs[0].dims[1].width, instr.inputs[2].dims[1].local(self.mesh)
                return 8.0 * tokens * keys * values / (threads * self.operations[0])
            case "all_reduce" | "all_to_all" | "all_gather":
                return self._exchange(instr, tokens)
        floats = sum(self._rows(v.dims[0], tokens) * v.dims[1].local(self.mesh) for v in instr.outputs)
        return floats / (threads * ELEMENTWISE)

    def _product(self, instr: Instr, tokens: int) -> float:
        """Seconds of a product: the longer of reading and computing, and a part of the shorter."""
        rows_dim = instr.inputs[0].dims[0]
        rows = max(LEAST_ROWS, self._rows(rows_dim, tokens))
        sources = [self.places[m.rank] for m in self.mesh.along(rows_dim.axis)] if rows_dim.axis else [self.own]
        rate = min(THREAD_READ * self.own.threads, NODE_READ / self.neighbours)
        slower = sum(map(self.own.factor, sources)) / len(sources)
        computed = read = 0.0
        for matrix in _matrices(instr):
            elements = self._elements(matrix)
            element_bytes, number = self.weight(matrix.name)
            used = elements
            if len(matrix.dims) > 2:  # a row takes some matrices of a stack, and all rows together most of them
                taken = instr.inputs[1].dims[-1].count / matrix.dims[0].count
                used, elements = elements * taken, elements * min(1.0, rows * taken)
            computed += 2.0 * rows * used / (self.own.threads * self.operations[number])
            read += elements * element_bytes * slower / rate
        return max(computed, read) + OVERLAP_LOSS * min(computed, read)

    def _exchange(self, instr: Instr, tokens: int) -> float:
        """Seconds of a collective."""
        reads = self._reads(instr, tokens)
        seconds = BARRIER * max((self.own.factor(peer) for peer, _ in reads), default=0.0)
        for peer, count in reads:
            each = EXCHANGE[peer.l3 != self.own.l3 or peer.node != self.own.node]
            seconds += count * self.own.factor(peer) / min(each * self.own.threads, MOST_EXCHANGE)
        if instr.op == "all_reduce":
            seconds += sum(count for _, count in reads) / 4 / (self.own.threads * ELEMENTWISE)
            hosts = len({self.places[m].host for m in self._members(instr)})
            if hosts > 1:
                width = instr.outputs[0].dims[1].elements
                assert width is not None  # of tokens alone the number is not known
                sent = 2 * (hosts - 1) / hosts * tokens * width * 4
                seconds += WIRE_SECONDS + sent / WIRE
        return seconds

    def _reads(self, instr: Instr, tokens: int) -> list[tuple[RankPlace, float]]:
        """What a collective reads in the memory of each other rank of this host, in bytes."""
        if instr.op not in ("all_reduce", "all_to_all", "all_gather"):
            return []
        members = self._members(instr)
        values = instr.inputs if instr.op == "all_reduce" else instr.outputs
        floats = sum(self._rows(v.dims[0], tokens) * v.dims[1].local(self.mesh) for v in values)
        each = floats * 4 / (1 if instr.op == "all_reduce" else len(members))
        return [(self.places[m], each) for m in members if m != self.mesh.rank and self.places[m].host == self.own.host]

    def _members(self, instr: Instr) -> list[int]:
        """The ranks that meet in a collective."""
        axis = instr.attrs["axis"]
        return [m.rank for m in self.mesh.along(axis)] if axis in self.mesh.axes else list(range(len(self.places)))

    def _rows(self, dim: Dim, tokens: int) -> int:
        """This rank's rows of a value: its share of the step's tokens, or of one row of logits."""
        rows = tokens if dim.name == "tokens" else 1
        return -(-rows // self.mesh.size(dim.axis)) if dim.axis else rows


def _matrices(instr: Instr) -> list[Weight]:
    """The weights of an instruction without its vectors."""
    return [w for w in instr.weights if w is not None and len(w.dims) > 1]


def layers_of(program: Program) -> list[tuple[tuple[Instr, ...], int]]:
    """The instructions from behind a layer's attention or linear attention to the next, which are one layer's, and how
    many layers are like that, in the order in which they come first; all of a model with a single layer.
    """
    attends = [i for i, instr in enumerate(program.instrs) if instr.op in MIXERS]
    if len(attends) < 2:
        return [(program.instrs, 1)]
    alike: dict[tuple[object, ...], tuple[tuple[Instr, ...], int]] = {}
    for begin, end in pairwise(attends):
        layer = program.instrs[begin + 1 : end + 1]
        shape = tuple((instr.op, tuple(v.dims for v in (*instr.inputs, *instr.outputs))) for instr in layer)
        first, count = alike.get(shape, (layer, 0))
        alike[shape] = first, count + 1
    return list(alike.values())


__all__ = ["LayerModel", "RankPlace", "layers_of", "place_of", "rank_places"]

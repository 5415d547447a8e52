"""Lowering for inference: a program becomes the short list of steps that the executor walks.

Neighbouring instructions that one step computes are found by `fusion`; each op's `lower` emits the step of its group,
and asks here for the places of values, weights and activations. An all_reduce becomes no step: the ranks' summands are
read in place by the `norm_quantize` that follows. Matching is total: an instruction that has no step and is no part of
one is an error here, before the first token.

Where tokens are sharded, a whole matrix is read through the shards that the ranks of the host hold for decode: side by
side where its rows are sharded, as a sum of products, in the order of the ranks, where its columns are. The sum's order
and the products are those of TENSOR, so both give the same bits. An all_to_all becomes no step either: queries, keys
and values are read where their tokens' rank wrote them, outputs of attention where their heads' rank did.

Where hosts share rows out (`host_rows`), an all_reduce over them becomes a reduce_scatter: each host has the sums of
some rows, norms and routes these alone, and gives the activations to the others before products that need all rows. To
experts rows go that have some there. The program is the same, and so are the bits.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.layout import Dim, Range
from ckdist.mesh import LOCAL, Mesh
from ckdist.program.arena import first_fit
from ckdist.program.fusion import Graph, Group, fuse, normed, residual
from ckdist.program.lowered import SLOTS, Buffer, LayerAttention, LayerState, Lowered, MatrixKey, VectorKey
from ckdist.program.ops import OPS
from ckdist.program.ops.experts import reads_input
from ckdist.program.program import Instr, Program, Value, Weight
from ckdist.program.step import ABSENT, NO_SPAN, MatrixIndex, Span, Step, ValueIndex, VectorIndex

ROW_ALIGN = 64

Key = TypeVar("Key", MatrixKey, VectorKey)


@dataclass(frozen=True)
class Residual:
    """x + post_factor * norm(sum of y), by the buffers and the vector; ABSENT what is not there."""

    x: ValueIndex
    y: ValueIndex
    post_norm: VectorIndex = VectorIndex(ABSENT)
    post_eps: float = 0.0
    post_factor: float = 1.0

    def fields(self) -> dict[str, Any]:
        """Of a step that reads it."""
        return dict(vars(self))


class Lowering:
    """What the ops' `lower` ask, and where they leave their steps. `at` has the buffer of each value in memory."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        formats: Callable[[str], int],
        block_columns: Callable[[str], int],
        max_tokens: int,
        stored: Mapping[Dim, Dim],
        host_rows: bool,
    ):
        self.program, self.mesh, self.max_tokens, self.stored = program, mesh, max_tokens, stored
        self.host_rows = host_rows
        self.of_hosts: set[ValueIndex] = set()  # buffers that have the rows of this host alone
        self.by_host: set[str] = set()  # values whose activations are of these
        self.formats, self.block_columns = formats, block_columns
        axis = program.inputs[0].dims[0].axis
        self.peers = mesh.along(axis) if axis else [mesh]  # that share the tokens
        self.local_tokens = -(-max_tokens // len(self.peers))
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = []
        self.matrices: Numbering[MatrixKey] = Numbering()
        self.vectors: Numbering[VectorKey] = Numbering()
        self.graph = Graph(program)
        self.at: dict[str, ValueIndex] = {}
        self.same: dict[str, Value] = {}  # a value -> the one in whose place it stands
        self.prepared: dict[str, dict[int, Span]] = {}  # a value -> its activations by format
        self.slots = 0
        self.attention: dict[int, LayerAttention] = {}
        self.states: dict[int, LayerState] = {}
        self.experts: dict[int, int] = {}
        self.key_places: tuple[int, ...] = ()  # of the layer at hand
        self.exchange_floats = 1

    def run(self) -> Lowered:
        """The steps of the whole program; see `lower`."""
        first_layer = self.program.boundaries[1] if len(self.program.boundaries) > 1 else None
        layer_steps = 0
        for instr, group in zip(self.program.instrs, fuse(self.program, self.graph), strict=True):
            if group is not None:
                self._lower(group)
            if first_layer in instr.outputs:
                layer_steps = len(self.steps)
        arena_bytes = self._place()
        return Lowered(
            self.steps,
            self.buffers,
            self.matrices.keys,
            self.vectors.keys,
            arena_bytes,
            self.exchange_floats,
            self.attention,
            self.states,
            layer_steps,
            len(self.peers) > 1,
            self._host_rows(),
            self.experts,
        )

    def _lower(self, group: Group) -> None:
        """Emits a group's steps. LayoutError where its op has none."""
        lower = OPS[group.instr.op].lower.get("inference")
        if lower is None:
            raise LayoutError(f"cannot lower {group.instr.op}: {group.instr}")
        lower(self, group)

    def emit(self, kind: str, rows: str = "tokens", **fields: Any) -> None:
        """Appends a step."""
        self.steps.append(Step(kind, fields, rows))

    # Values

    def stands_for(self, value: Value, source: Value) -> None:
        """Says that `value` is read where `source` lies."""
        self.same[value.name] = source

    def source(self, value: Value) -> Value:
        """The value in whose place `value` stands."""
        while value.name in self.same:
            value = self.same[value.name]
        return value

    def place_of(self, value: Value) -> ValueIndex:
        """The buffer of a value. LayoutError where it is not written anywhere yet."""
        found = self.at.get(self.source(value).name)
        if found is None:
            raise LayoutError(f"cannot lower %{value.name}: its reader needs it in memory")
        return found

    def buffer(self, place: str, width: int, **more: Any) -> ValueIndex:
        """Adds a buffer; returns its index."""
        self.buffers.append(Buffer(place, width, **more))
        return ValueIndex(len(self.buffers) - 1)

    def shards(self, buffers: list[Buffer]) -> Span:
        """Adds buffers that stand one after another."""
        first = ValueIndex(len(self.buffers))
        self.buffers += buffers
        return Span(first, len(buffers))

    def slot(self, width: int, rows: int, most: int = 0, lead: int = 0, selected: bool = False) -> ValueIndex:
        """A buffer in the current exchange slot; `most`: its width on the rank where that is largest."""
        self.exchange_floats = max(self.exchange_floats, rows * max(width, most))
        return self.buffer("slot", width, offset=self.slots % SLOTS, lead=lead, rows=rows, selected=selected)

    def most_rows(self, value: Value) -> int:
        """That `value` has here at most."""
        return self.max_tokens if value.rows == "selected" else self.local_tokens

    def rows_of(self, value: Value) -> str:
        """The rows of a step that multiplies `value`."""
        return "host" if value.name in self.by_host else value.rows

    def next_slot(self) -> None:
        """What is exchanged next goes to another slot."""
        self.slots += 1

    def results(self, values: Sequence[Value]) -> list[ValueIndex]:
        """The buffers that a step writes: in an exchange slot what is partial, or is exchanged next."""
        first = values[0]
        rows = self.local_tokens if first.dims[0].axis else self.max_tokens
        selected = first.selected
        widths = [v.dims[-1].local(self.mesh) for v in values]
        readers = [self.graph.reader(v) for v in values]
        if first.partial and self.host_rows and not selected:
            total = self.buffer("arena", widths[0], rows=rows)
            self.of_hosts.add(total)
            if self._host_rows() == "own":
                return [self.buffer("arena", widths[0], rows=rows, sum=total)]
            part = self.slot(widths[0], rows)
            self.buffers[part] = replace(self.buffers[part], sum=total)
            self.next_slot()
            return [part]
        if first.partial and len(self.peers) > 1:  # over hosts, whose ranks share the tokens
            place = {"offset": self.slots % SLOTS, "rows": self.max_tokens}
            results = [self.buffer("sums", widths[0], **place, selected=selected)]
            self.exchange_floats = max(self.exchange_floats, self.max_tokens * widths[0])
        elif first.partial:
            results = [self.slot(widths[0], rows, selected=selected)]
        elif (last := readers[-1]) is not None and last.op == "all_to_all" and self._is_shared(last):
            return self._results_of_an_exchange(values, last, rows)
        elif last is not None and last.op == "all_to_all":  # side by side in one row
            stay = [reader is not None and reader.op == "gated" for reader in readers]  # with the rank of the token
            widths = [sum(end - begin for begin, end in self.pieces(v.dims[-1])) for v in values]
            behind = readers[0].outputs[0].dims[-1].count if readers[0] and readers[0].op == "sum_squares" else 0
            leads = [0, *itertools.accumulate(0 if own else n for n, own in zip(widths, stay, strict=True))]
            row = leads.pop() + behind
            results = [
                self.buffer("arena", width, rows=rows) if own else self.slot(row, rows, lead=lead)
                for width, lead, own in zip(widths, leads, stay, strict=True)
            ]
        else:
            return [self.buffer("arena", width, rows=rows, selected=selected) for width in widths]
        self.next_slot()
        return results

    def _host_rows(self) -> str:
        """Which ranks share rows out over hosts: as in `enum ckdist_host_rows`."""
        if not self.host_rows:
            return "none"
        return "alike" if LOCAL in self.mesh.axes and len(self.peers) == 1 else "own"

    def _is_shared(self, exchange: Instr) -> bool:
        """Whether several linears make what is exchanged."""
        makers = [self.graph.maker(v, "linear") for v in exchange.inputs]
        return None not in makers and any(maker is not makers[0] for maker in makers)

    def _results_of_an_exchange(self, values: Sequence[Value], exchange: Instr, rows: int) -> list[ValueIndex]:
        """The buffers of what one of several steps writes for an exchange, whose values stand side by side in one row,
        and of what stays here. The last of these steps ends the row.
        """
        widths = [sum(end - begin for begin, end in self.pieces(v.dims[-1])) for v in exchange.inputs]
        leads = {v.name: sum(widths[:i]) for i, v in enumerate(exchange.inputs)}
        results = [
            self.slot(sum(widths), rows, lead=leads[v.name])
            if v.name in leads
            else self.buffer("arena", v.dims[-1].local(self.mesh), rows=rows)
            for v in values
        ]
        if exchange.inputs[0] in values:  # which is made last
            self.next_slot()
        return results

    # Weights

    def shares(self, dim: Dim) -> list[Range]:
        """The elements of a dimension that the weights of each rank have: this rank's, where decode shards it
        likewise, else those of the ranks that share the tokens.
        """
        stored = self.stored.get(dim, dim)
        meshes = [self.mesh] if dim.axis == stored.axis else self.peers
        return [stored.span(mesh) for mesh in meshes]

    def pieces(self, dim: Dim) -> list[Range]:
        """Shares that cover a dimension: each once where ranks have the same one, and no empty ones unless there is
        no other.
        """
        shares = dict.fromkeys(self.shares(dim))
        return [s for s in shares if s[0] < s[1]] or list(shares)[:1]

    def matrix(self, keys: list[MatrixKey]) -> Span:
        """Matrices that stand one after another."""
        return Span(MatrixIndex(self.matrices.place(keys)), len(keys))

    def shard_vectors(self, w: Weight | None, shares: list[Range]) -> VectorIndex:
        """The first of a vector's shards; ABSENT where there is no vector."""
        return VectorIndex(ABSENT if w is None else self.vectors.place([(w.name, share) for share in shares]))

    def held_vector(self, w: Weight) -> VectorIndex:
        """This rank's part of a vector as its memory has it, whatever the program's sharding."""
        (dim,) = w.dims
        return self.shard_vectors(w, [self.stored.get(dim, dim).span(self.mesh)])

    def vector(self, w: Weight | None) -> VectorIndex:
        """This rank's part of a vector; ABSENT where there is none."""
        return self.shard_vectors(w, [] if w is None else [w.dims[0].span(self.mesh)])

    # The residual stream and what products read

    def residual(self, value: Value) -> Residual:
        """What `value` is made of, or where it lies. LayoutError where its first operand is not in memory."""
        value = self.source(value)
        add = self.graph.maker(value, "add")
        if value.name in self.at or add is None:
            return Residual(ValueIndex(ABSENT), self.place_of(value))
        x = self.place_of(add.inputs[0])
        if self.buffers[x].place != "arena":
            raise LayoutError(f"cannot lower an add whose first operand was not normed before: {add}")
        parts = residual(self.graph, value)
        factor = parts["post_factor"].attrs["factor"] if "post_factor" in parts else 1.0
        if norm := parts.get("post_norm"):
            return Residual(x, self.place_of(norm.inputs[0]), self.vector(norm.weights[0]), norm.attrs["eps"], factor)
        y = parts["post_factor"].inputs[0] if "post_factor" in parts else add.inputs[1]
        return Residual(x, self.place_of(y), post_factor=factor)

    def columns(self, value: Value) -> list[Range]:
        """The columns of the matrices that read `value`: of the shards whose products are summed, or all."""
        shares = self.shares(value.dims[-1])
        return shares if len(set(shares)) > 1 else shares[:1]

    def activations(self, value: Value, name: str) -> Span:
        """What matrix `name` reads of `value`: one buffer, or one for each shard of the columns. The first call emits
        the norm_quantize, for all matrices that read it.
        """
        if value.name not in self.prepared:
            self._norm_quantize(value)
        return self.prepared[value.name][self.formats(name)]

    def normed(self, value: Value) -> tuple[Residual, dict[str, Any]]:
        """What `value` is the norm of, and that norm, as fields of a step; without one what there is of the residual,
        or where the value lies.
        """
        parts = normed(self.graph, value)
        norm, gate = parts.get("norm"), parts.get("out_gate")
        if gate is not None or not parts:
            source = Residual(ValueIndex(ABSENT), self.place_of(gate.inputs[1] if gate is not None else value))
        else:
            source = self.residual(norm.inputs[0] if norm else value)
        centred = norm is not None and norm.op == "layer_norm"
        return source, {
            "norm": self.vector(norm.weights[0]) if norm else VectorIndex(ABSENT),
            "norm_bias": self.vector(norm.weights[1]) if norm and centred else VectorIndex(ABSENT),
            "eps": norm.attrs["eps"] if norm else 0.0,
            "factor": parts["factor"].attrs["factor"] if "factor" in parts else 1.0,
            "centred": centred,
        }

    def _norm_quantize(self, value: Value) -> None:
        """Emits the step that makes the activations of `value`, and keeps the residual where that is read again."""
        parts = normed(self.graph, value)
        norm, sum_, kept = parts.get("norm"), ValueIndex(ABSENT), ValueIndex(ABSENT)
        stream = norm.inputs[0] if norm else value
        gate = parts.get("out_gate")
        source, numbers = self.normed(value)
        lies = self.buffers[source.y].place == "arena" and source.x == ABSENT and source.post_norm == ABSENT
        again = any(reader.op in ("add", "select_rows") for reader in self.graph.readers(stream))
        by_host, selects = source.y in self.of_hosts, self._selects(stream)
        if again and (not lies or (by_host and selects)):
            selected = value.selected
            sum_ = self.buffer("arena", self.buffers[source.y].width, rows=self.local_tokens, selected=selected)
            self.at[self.source(stream).name] = sum_
            if by_host and not selects:
                self.of_hosts.add(sum_)
        if norm and any(reader.op in ("add", "select_rows") for reader in self.graph.readers(value)):
            kept = self.buffer("arena", self.buffers[source.y].width, rows=self.local_tokens, selected=value.selected)
            self.at[self.source(value).name] = kept
        gather = by_host and not all(self._routes(reader) for reader in self.graph.readers(value))
        if by_host and not gather:
            self.by_host.add(value.name)
        activations = self._quantized(value)
        self.prepared[value.name] = activations
        self.emit(
            "norm_quantize",
            "host" if by_host else value.rows,
            **source.fields(),
            **numbers,
            gate=self.place_of(gate.inputs[0]) if gate is not None else ValueIndex(ABSENT),
            sum=sum_,
            normed=kept,
            activations=[activations.get(number, NO_SPAN) for number in range(3)],
            gather=gather,
            gather_sum=gather and by_host and selects and sum_ != ABSENT,
        )

    def _selects(self, stream: Value) -> bool:
        """Whether rows of the residual stream are selected from here on, so that every host needs all."""
        return any(reader.op == "select_rows" for reader in self.graph.readers(stream))

    def _routes(self, reader: Instr) -> bool:
        """Whether a reader needs the rows of this host alone: experts, to which rows go, and what chooses them."""
        if reader.op == "experts":
            return reader.weight(0).dims[0].axis is not None
        readers = [other for v in reader.outputs for other in self.graph.readers(v)]
        return reader.op == "linear" and bool(readers) and all(other.op == "route" for other in readers)

    def _quantized(self, value: Value) -> dict[int, Span]:
        """Buffers for `value` as its readers' matrices read it, by format: whole blocks of their types."""
        found: dict[int, list[Buffer]] = {}
        rows = self.most_rows(value)
        for reader in self.graph.readers(value):
            for w in _multiply(reader, value):
                number = self.formats(w.name)
                buffers = [self.as_activations(w, part, rows, value.selected) for part in self.columns(value)]
                if found.setdefault(number, buffers) != buffers:
                    raise LayoutError(f"matrices that read %{value.name} have different columns: {reader}")
        spans = {}
        for number, buffers in sorted(found.items()):
            spans[number] = self.shards(buffers)
        return spans

    def as_activations(self, w: Weight, columns: Range, rows: int, selected: bool) -> Buffer:
        """What columns of `w` are multiplied with: whole blocks of its type, of which the floats are a part."""
        (begin, end), block = columns, self.block_columns(w.name)
        first, last = begin // block * block, min(-(-end // block) * block, w.dims[-1].elements)
        width = last - first if begin < end else 0
        return Buffer("activations", width, 0, self.formats(w.name), begin - first, end - begin, rows, selected)

    # Memory

    def _place(self) -> int:
        """Gives arena buffers and activations their offsets; returns the arena's bytes.

        Time is counted in stretches between barriers: a small batch's norm_quantize has no barrier of its own, so it
        shares its stretch with the linear that follows, and nothing written in a stretch may lie on what is read in it.
        """
        uses, time = [], 0
        for step in self.steps:
            places = ("arena", "activations")
            used = [int(b) for b in step.operands(ValueIndex)]
            used += [self.buffers[b].sum for b in used]
            uses += [(time, b) for b in used if b != ABSENT and self.buffers[b].place in places]
            time += step.kind != "norm_quantize"
        offsets, total = first_fit(uses, lambda b: self._bytes(self.buffers[b]))
        for b, offset in offsets.items():
            self.buffers[b] = replace(self.buffers[b], offset=offset)
        return total

    def _bytes(self, buffer: Buffer) -> int:
        """Bytes of a buffer in the arena, a multiple of ROW_ALIGN."""
        if buffer.place == "arena":
            row = 4 * buffer.width
        else:
            row = native.check(native.lib.ckdist_activation_bytes(buffer.format, buffer.width))
        return -(-row * (buffer.rows or self.max_tokens) // ROW_ALIGN) * ROW_ALIGN


def _multiply(reader: Instr, value: Value) -> list[Weight]:
    """The reader's matrices that multiply `value`: of a linear all, of a low_rank half, of experts gates and ups."""
    weights: Sequence[Weight | None] = reader.weights
    if reader.op == "low_rank":
        weights = weights[::2]
    elif reader.op == "experts":
        weights = reads_input([reader.weight(index) for index in range(len(weights))], reader.attrs)
    return [w for w in weights if w is not None and len(w.dims) > 1] if value == reader.inputs[0] else []


class Numbering(Generic[Key]):
    """Keys, numbered from 0."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self._first: dict[Key, int] = {}

    def place(self, keys: Sequence[Key]) -> int:
        """The first of the numbers of `keys`, which follow one another. A single one that is there keeps its number;
        others are added.
        """
        if len(keys) == 1 and keys[0] in self._first:
            return self._first[keys[0]]
        begin = len(self.keys)
        for number, key in enumerate(keys, begin):
            self._first.setdefault(key, number)
        self.keys += keys
        return begin


def stored_dims(tokens: Program, tensors: Program) -> dict[Dim, Dim]:
    """For `lower`, of a program whose tokens are sharded: how its weights' dimensions are sharded in `tensors`, which
    says what the ranks hold.
    """
    held = {w.name: w.dims for w in tensors.weights}
    return {dim: own for w in tokens.weights for dim, own in zip(w.dims, held[w.name], strict=True)}


def lower(
    program: Program,
    mesh: Mesh,
    formats: Callable[[str], int],
    block_columns: Callable[[str], int],
    max_tokens: int,
    stored: Mapping[Dim, Dim] | None = None,
    host_rows: bool = False,
) -> Lowered:
    """The steps of this rank.

    `stored`, for a program whose tokens are sharded: its weights' dimensions as they are sharded in the ranks' memory.
    `host_rows`: the hosts share out the rows of a rank; each has as many ranks.

    `formats(weight name)` is the activation format (of `enum ckdist_activation_format`) that its kernel reads,
    `block_columns(weight name)` the columns of one of its blocks. Raises LayoutError for a program that the executor
    has no step for.
    """
    return Lowering(program, mesh, formats, block_columns, max_tokens, stored or {}, host_rows).run()

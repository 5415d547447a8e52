"""Lowering for inference: turns a program into the list of steps that the executor runs.

`fusion` groups neighbouring instructions that one step computes. Each op's `lower` emits the step of its group, and
calls `ServingLowering` for the indices of values, weights and activations. An all_reduce becomes no step: the following
`norm_quantize` reads the summands of all ranks in place. An instruction without a step that belongs to no group is an
error here, before the first token.

If tokens are sharded, a whole matrix is read through the shards that the ranks of the host hold for decode. Shards of
rows give results side by side. Shards of columns give a sum of products, in rank order. Products and order are those of
the TENSOR layout, so both layouts give the same bits. An all_to_all becomes no step either: queries, keys and values
are read in the memory of the rank that has the tokens, attention outputs in that of the rank that has the heads.

If hosts share rows out (`host_rows`), an all_reduce over hosts becomes a reduce_scatter. Each host norms and routes
only the rows whose sums it has, and sends their activations to the others before products that need all rows. For
experts, a row goes only to hosts that have one of its chosen experts. The program and the bits do not change.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.layout import Dim, Range
from ckdist.mesh import LOCAL, Mesh
from ckdist.program.cache import LayerCache
from ckdist.program.fusion import fuse, normed, residual
from ckdist.program.lowered import SLOTS, Buffer, Lowered, MatrixKey, StepList, VectorKey
from ckdist.program.lowering import ROW_ALIGN, Lowering
from ckdist.program.ops.elementwise import GATES
from ckdist.program.program import Instr, Program, Value, Weight
from ckdist.program.step import ABSENT, NO_SPAN, MatrixIndex, Span, ValueIndex, VectorIndex

Key = TypeVar("Key", MatrixKey, VectorKey)


@dataclass(frozen=True)
class Residual:
    """scalar * (x + post_factor * norm(sum of y)), as operand indices. Absent operands are ABSENT."""

    x: ValueIndex
    y: ValueIndex
    post_norm: VectorIndex = VectorIndex(ABSENT)
    scalar: VectorIndex = VectorIndex(ABSENT)
    post_eps: float = 0.0
    post_factor: float = 1.0

    def fields(self) -> dict[str, Any]:
        """The fields of a step that reads this residual."""
        return dict(vars(self))


MOST_FORMS = 3  # forms in which one norm_quantize writes a value


class ServingLowering(Lowering):
    """The lowering of a program that serves: shards of weights, exchanges between ranks, activations of products.

    Args:
        program: The traced program.
        mesh: The mesh, with this rank's coordinates.
        formats: Weight name -> the activation format (`enum ckdist_activation_format`) that its kernel reads.
        block_columns: Weight name -> columns of one block of its type.
        max_tokens: Tokens of a step.
        stored: Only if tokens are sharded: program dimension of a weight -> the dimension as the ranks hold it.
        host_rows: The hosts share out the rows of a rank. All hosts have the same number of ranks.
        prompts: The rows are prompts' rows; `formats` are those of their products.
    """

    step_set = "inference"

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        formats: Callable[[str], int],
        block_columns: Callable[[str], int],
        max_tokens: int,
        stored: Mapping[Dim, Dim] | None = None,
        host_rows: bool = False,
        prompts: bool = False,
    ):
        super().__init__(mesh, max_tokens)
        self.begin(program)
        self.stored, self.host_rows, self.prompts = stored or {}, host_rows, prompts
        self.of_hosts: set[ValueIndex] = set()  # buffers with the rows of this host only
        self.by_host: set[str] = set()  # values whose activations have the rows of this host only
        self.formats, self.block_columns = formats, block_columns
        axis = program.inputs[0].dims[0].axis
        self.peers = mesh.along(axis) if axis else [mesh]  # the ranks that share the tokens
        self.local_tokens = -(-max_tokens // len(self.peers))
        self.matrices: Numbering[MatrixKey] = Numbering()
        self.vectors: Numbering[VectorKey] = Numbering()
        self.prepared: dict[str, dict[str, Span]] = {}  # value -> its activations by name of the matrix that reads them
        self.slots = 0  # exchange slots so far
        self.caches: dict[int, LayerCache] = {}
        self.experts: dict[int, int] = {}
        self.key_places: tuple[int, ...] = ()  # LayerCache.key_places of the current layer
        self.exchange_floats = 1

    def run(self) -> Lowered:
        """Lowers the program to the steps of this rank. Raises LayoutError if an instruction has no step."""
        first_layer = self.program.boundaries[1] if len(self.program.boundaries) > 1 else None
        layer_steps = 0
        for instr, group in zip(self.program.instrs, fuse(self.program, self.graph), strict=True):
            if group is not None:
                self.rule(group.instr)(self, group)
            if first_layer in instr.outputs:
                layer_steps = len(self.steps)
        products = {p["out"] for step in self.steps if step.kind == "linear" for p in step.fields["products"]}
        for i, b in enumerate(self.buffers):
            b.stride = self._stride(b, i in products)
        return Lowered(
            [StepList(self.steps)],
            self.buffers,
            self.place(self.steps),
            matrices=self.matrices.keys,
            vectors=self.vectors.keys,
            exchange_floats=self.exchange_floats,
            caches=self.caches,
            layer_steps=layer_steps,
            tokens_sharded=len(self.peers) > 1,
            host_rows=self._host_rows(),
            prompts=self.prompts,
            experts=self.experts,
        )

    def _stride(self, buffer: Buffer, product: bool) -> int:
        """Bytes from row to row. Hosts exchange rows that lie side by side.

        Other rows that a product writes are an odd number of cache lines apart. At a distance of some KB they would
        share few sets of the caches, and products of 1,024 columns with AMX would be slower by 10 to 16 %.
        """
        if buffer.place == "activations":
            return _activation_bytes(buffer.format, buffer.width)
        if product and buffer.place == "arena" and not self.host_rows:
            return (-(-4 * buffer.width // ROW_ALIGN) | 1) * ROW_ALIGN
        return 4 * buffer.width

    # Values

    def shards(self, buffers: list[Buffer]) -> Span:
        """Adds buffers with consecutive indices."""
        first, *_ = [self.add(buffer) for buffer in buffers]
        return Span(first, len(buffers))

    def slot(self, width: int, rows: int, most: int = 0, lead: int = 0, selected: bool = False) -> ValueIndex:
        """A buffer in the current exchange slot. `most` is its largest width on any rank."""
        self.exchange_floats = max(self.exchange_floats, rows * max(width, most))
        return self.buffer("slot", width, offset=self.slots % SLOTS, lead=lead, rows=rows, selected=selected)

    def most_rows(self, value: Value) -> int:
        """Upper bound on the rows of `value` on this rank."""
        return self.max_tokens if value.rows == "selected" else self.local_tokens

    def rows_of(self, value: Value) -> str:
        """The `rows` field of a step that multiplies `value`."""
        return "host" if value.name in self.by_host else value.rows

    def own_rows(self, *values: Value) -> list[ValueIndex]:
        """Consecutive new buffers for values whose columns are whole, with the rows of this rank's tokens."""
        places = [self.buffer("arena", v.dims[-1].elements, rows=self.local_tokens) for v in values]
        self.at |= {value.name: place for value, place in zip(values, places, strict=True)}
        return places

    def result(self, value: Value) -> ValueIndex:
        """The buffer that a step with one result writes: see `results`."""
        return self.results([value])[0]

    def results(self, values: Sequence[Value]) -> list[ValueIndex]:
        """The buffers that a step writes. Partial values, and operands of an all_to_all, are in exchange slots."""
        places = self._result_places(values)
        self.at |= {value.name: place for value, place in zip(values, places, strict=True)}
        return places

    def _result_places(self, values: Sequence[Value]) -> list[ValueIndex]:
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
            self.buffers[part].sum = total
            self.slots += 1
            return [part]
        if first.partial and len(self.peers) > 1:  # partial over hosts; the ranks of a host share the tokens
            place = {"offset": self.slots % SLOTS, "rows": self.max_tokens}
            results = [self.buffer("sums", widths[0], **place, selected=selected)]
            # each rank sums the rows of its tokens, at most local_tokens
            self.exchange_floats = max(self.exchange_floats, self.local_tokens * len(self.peers) * widths[0])
        elif first.partial:
            results = [self.slot(widths[0], rows, selected=selected)]
        elif (last := readers[-1]) is not None and last.op == "all_to_all" and self._is_shared(last):
            return self._results_of_an_exchange(values, last, rows)
        elif last is not None and last.op == "all_to_all":  # the exchanged values lie side by side in one row
            # values that stay on the rank of the token
            stay = [reader is not None and reader.op in ("gated", "gated_heads") for reader in readers]
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
        self.slots += 1
        return results

    def is_exchanged(self, value: Value) -> bool:
        """True if an all_to_all reads a value."""
        reader = self.graph.reader(value)
        return reader is not None and reader.op == "all_to_all"

    def head_results(self, out: Value) -> tuple[ValueIndex, bool]:
        """The buffer for all tokens of this rank's heads, and whether an all_to_all exchanges them for tokens."""
        width, exchanged = out.dims[-1].local(self.mesh), self.is_exchanged(out)
        if exchanged:
            most = max(out.dims[-1].local(mesh) for mesh in self.peers)
            self.at[out.name] = self.slot(width, self.max_tokens, most)
            self.slots += 1
        else:
            self.at[out.name] = self.buffer("arena", width)
        return self.at[out.name], exchanged

    def _host_rows(self) -> str:
        """A name of `enum ckdist_host_rows`."""
        if not self.host_rows:
            return "none"
        return "alike" if LOCAL in self.mesh.axes and len(self.peers) == 1 else "own"

    def _is_shared(self, exchange: Instr) -> bool:
        """True if more than one linear makes the operands of an all_to_all."""
        makers = [self._linear_of(v) for v in exchange.inputs]
        return None not in makers and any(maker is not makers[0] for maker in makers)

    def _linear_of(self, value: Value) -> Instr | None:
        """The linear that makes a value, with an adapter or without."""
        if adapted := self.graph.maker(value, "low_rank"):
            value = adapted.inputs[1 + [v.name for v in adapted.outputs].index(value.name)]
        return self.graph.maker(value, "linear")

    def _results_of_an_exchange(self, values: Sequence[Value], exchange: Instr, rows: int) -> list[ValueIndex]:
        """The buffers that one of several steps writes for an all_to_all, and those of values that stay here.

        The exchanged values lie side by side in one row. The last of these steps completes the row.
        """
        widths = [sum(end - begin for begin, end in self.pieces(v.dims[-1])) for v in exchange.inputs]
        leads = {v.name: sum(widths[:i]) for i, v in enumerate(exchange.inputs)}
        results = [
            self.slot(sum(widths), rows, lead=leads[v.name])
            if v.name in leads
            else self.buffer("arena", v.dims[-1].local(self.mesh), rows=rows)
            for v in values
        ]
        if exchange.inputs[0] in values:  # the first operand is made last
            self.slots += 1
        return results

    # Weights

    def shares(self, dim: Dim) -> list[Range]:
        """The ranges of a dimension through which a weight is read.

        This rank's range if decode shards the dimension in the same way, else one range per rank that shares the
        tokens.
        """
        stored = self.stored.get(dim, dim)
        meshes = [self.mesh] if dim.axis == stored.axis else self.peers
        return [stored.span(mesh) for mesh in meshes]

    def pieces(self, dim: Dim) -> list[Range]:
        """The distinct ranges of `shares`, without empty ones; one empty range if there is no other."""
        shares = dict.fromkeys(self.shares(dim))
        return [s for s in shares if s[0] < s[1]] or list(shares)[:1]

    def matrix(self, keys: list[MatrixKey]) -> Span:
        """The indices of consecutive matrices."""
        return Span(MatrixIndex(self.matrices.place(keys)), len(keys))

    def shard_vectors(self, w: Weight | None, shares: list[Range]) -> VectorIndex:
        """The index of the first shard of a vector; ABSENT if `w` is None."""
        return VectorIndex(ABSENT if w is None else self.vectors.place([(w.name, share) for share in shares]))

    def held_vector(self, w: Weight) -> VectorIndex:
        """This rank's part of a vector as it is stored, independent of the program's sharding."""
        (dim,) = w.dims
        return self.shard_vectors(w, [self.stored.get(dim, dim).span(self.mesh)])

    def vector(self, w: Weight | None) -> VectorIndex:
        """This rank's part of a vector; ABSENT if `w` is None."""
        return self.shard_vectors(w, [] if w is None else [w.dims[0].span(self.mesh)])

    # The residual stream and the activations

    def residual(self, value: Value) -> Residual:
        """The residual that makes `value`, or its buffer alone. Raises LayoutError if x is not in memory."""
        value = self.source(value)
        by = self.graph.maker(value, "scale_by")
        add = self.graph.maker(by.inputs[0] if by else value, "add")
        if value.name in self.at or add is None:
            return Residual(ValueIndex(ABSENT), self.place_of(value))
        x = self.place_of(add.inputs[0])
        if self.buffers[x].place != "arena":
            raise LayoutError(f"cannot lower an add whose first operand was not normed before: {add}")
        parts = residual(self.graph, value)
        factor = parts["post_factor"].attrs["factor"] if "post_factor" in parts else 1.0
        scalar = self.vector(by.weight(0) if by else None)
        if norm := parts.get("post_norm"):
            y, weight = self.place_of(norm.inputs[0]), self.vector(norm.weights[0])
            return Residual(x, y, weight, scalar, norm.attrs["eps"], factor)
        y = parts["post_factor"].inputs[0] if "post_factor" in parts else add.inputs[1]
        return Residual(x, self.place_of(y), scalar=scalar, post_factor=factor)

    def columns(self, value: Value) -> list[Range]:
        """The column ranges of matrices that read `value`: one per shard whose products are summed, or one for all."""
        shares = self.shares(value.dims[-1])
        return shares if len(set(shares)) > 1 else shares[:1]

    def activations(self, value: Value, name: str) -> Span:
        """The activations that matrix `name` reads: one buffer, or one for each shard of its columns.

        The first call emits the norm_quantize for all matrices that read `value`.
        """
        if value.name not in self.prepared:
            self._norm_quantize(value)
        elif (last := next(reversed(self.prepared))) != value.name:  # threads keep the activations of one value
            raise LayoutError(f"cannot lower: {name} reads %{value.name} after a linear of %{last}; reorder them")
        return self.prepared[value.name][name]

    def normed(self, value: Value) -> tuple[Residual, dict[str, Any]]:
        """The operand of the norm that makes `value`, and the fields of a step for that norm.

        Without a norm: the residual that makes `value`, or its buffer, and neutral fields.
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
        """Emits the step that makes the activations of `value`. It keeps the residual if that is read again."""
        parts = normed(self.graph, value)
        norm, sum_, kept = parts.get("norm"), ValueIndex(ABSENT), ValueIndex(ABSENT)
        stream = norm.inputs[0] if norm else value
        gate = parts.get("out_gate")
        source, numbers = self.normed(value)
        lies = self.buffers[source.y].place == "arena" and source.x == ABSENT and source.post_norm == ABSENT
        again = any(reader.op in ("add", "join", "select_rows") for reader in self.graph.readers(stream))
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
        self.prepared[value.name], spans = self._quantized(value)
        self.emit(
            "norm_quantize",
            "host" if by_host else value.rows,
            **source.fields(),
            **numbers,
            gate=self.place_of(gate.inputs[0]) if gate is not None else ValueIndex(ABSENT),
            gate_function=GATES[gate.attrs["function"] if gate is not None else "none"],
            gate_width=0 if gate is None else gate.outputs[0].dims[-1].elements // gate.inputs[0].dims[-1].elements,
            sum=sum_,
            normed=kept,
            activations=[*spans, *[NO_SPAN] * (MOST_FORMS - len(spans))],
            gather=gather,
            gather_sum=gather and by_host and selects and sum_ != ABSENT,
        )

    def _selects(self, stream: Value) -> bool:
        """True if a select_rows reads the residual stream, so that each host needs all rows."""
        return any(reader.op == "select_rows" for reader in self.graph.readers(stream))

    def _routes(self, reader: Instr) -> bool:
        """True if a reader needs only the rows of this host: sharded experts, and the router that selects them."""
        if reader.op == "experts":
            return reader.weight(0).dims[0].axis is not None
        readers = [other for v in reader.outputs for other in self.graph.readers(v)]
        return reader.op == "linear" and bool(readers) and all(other.op == "route" for other in readers)

    def _quantized(self, value: Value) -> tuple[dict[str, Span], list[Span]]:
        """Activation buffers of `value`, in whole blocks of the types of its readers' matrices.

        Returns the span that each matrix reads, by name, and all spans: one for each format and division of columns.
        """
        found: list[tuple[int, list[Buffer], list[str]]] = []  # (format, buffers, names of matrices)
        rows = self.most_rows(value)
        for reader in self.graph.readers(value):
            for w in _multiply(reader, value):
                buffers = [self.as_activations(w, part, rows, value.selected) for part in self.columns(value)]
                number = self.formats(w.name)
                same = [names for *form, names in found if form == [number, buffers]]
                if same:
                    same[0].append(w.name)
                else:
                    found.append((number, buffers, [w.name]))
        if len(found) > MOST_FORMS:
            raise LayoutError(f"matrices that read %{value.name} have {len(found)} forms of columns, of {MOST_FORMS}")
        found.sort(key=lambda form: form[0])
        spans = [self.shards(buffers) for _, buffers, _ in found]
        return {name: span for (*_, names), span in zip(found, spans, strict=True) for name in names}, spans

    def as_activations(self, w: Weight, columns: Range, rows: int, selected: bool) -> Buffer:
        """The activation buffer for `columns` of `w`: whole blocks of its type that contain these columns."""
        (begin, end), block = columns, self.block_columns(w.name)
        first, last = begin // block * block, min(-(-end // block) * block, w.dims[-1].elements)
        width = last - first if begin < end else 0
        return Buffer("activations", width, 0, self.formats(w.name), begin - first, end - begin, rows, selected)


def _activation_bytes(number: int, columns: int) -> int:
    """Bytes of a row of activations in a format."""
    return native.check(native.lib.ckdist_activation_bytes(number, columns))


def _multiply(reader: Instr, value: Value) -> list[Weight]:
    """The reader's matrices that multiply `value`: all of a linear, each A of a low_rank, gates and ups of experts."""
    weights: Sequence[Weight | None] = reader.weights
    if reader.op == "low_rank":
        weights = weights[::2]
    elif reader.op == "experts":
        from ckdist.program.ops.experts import reads_input

        weights = reads_input([reader.weight(index) for index in range(len(weights))], reader.attrs)
    return [w for w in weights if w is not None and len(w.dims) > 1] if value == reader.inputs[0] else []


class Numbering(Generic[Key]):
    """Numbers keys from 0."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self._first: dict[Key, int] = {}

    def place(self, keys: Sequence[Key]) -> int:
        """Returns the first of consecutive numbers for `keys`.

        A single key that is known already keeps its number. Otherwise all keys are added.
        """
        if len(keys) == 1 and keys[0] in self._first:
            return self._first[keys[0]]
        begin = len(self.keys)
        for number, key in enumerate(keys, begin):
            self._first.setdefault(key, number)
        self.keys += keys
        return begin


def stored_dims(tokens: Program, tensors: Program) -> dict[Dim, Dim]:
    """Maps each weight dimension of `tokens` to the same dimension in `tensors`: the argument `stored` of a lowering.

    `tokens` is a program whose tokens are sharded. `tensors` is the program of decode, which defines the shards that
    the ranks hold.
    """
    held = {w.name: w.dims for w in tensors.weights}
    return {dim: own for w in tokens.weights for dim, own in zip(w.dims, held[w.name], strict=True)}

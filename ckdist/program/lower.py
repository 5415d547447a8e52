"""Lowering: a program becomes the short list of steps that the native replay walks.

Ops are fused to what one pass over memory can do between two barriers: residual sum + norms + preparation of
activations (`prepare`), all matrices that read one input + bias + gate (`linear`), q/k norms + rotation + cache +
attention (`attend`). An all_reduce becomes no step: the ranks' parts are read in place by the `prepare` that follows.
Matching is local and total: an instruction that fits no pattern is an error here, before the first token.

Where tokens are sharded, a whole matrix is read through the shards that the ranks of the host hold for decode: side by
side where its rows are sharded, as a sum of products, in the order of the ranks, where its columns are. The sum's order
and the products are those of TENSOR, so both give the same bits. An all_to_all becomes no step either: queries, keys
and values are read where their tokens' rank wrote them, outputs of attention where their heads' rank did.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.layout import Dim, Mesh, Range
from ckdist.program.arena import first_fit
from ckdist.program.lowered import (
    GATES,
    NO_ROPE,
    RANK_UNIT,
    ROPE_TABLES,
    SLOTS,
    Buffer,
    LayerAttention,
    Lowered,
    MatrixKey,
    Step,
    VectorKey,
)
from ckdist.program.pending import Head, Normed, Pending, Residual
from ckdist.program.program import Instr, Program, Value, Weight

ROW_ALIGN = 64

Key = TypeVar("Key", MatrixKey, VectorKey)


class _Lowering:
    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        formats: Callable[[str], int],
        block_columns: Callable[[str], int],
        max_tokens: int,
        stored: Mapping[Dim, Dim],
    ):
        self.program, self.mesh, self.max_tokens, self.stored = program, mesh, max_tokens, stored
        self.formats, self.block_columns = formats, block_columns
        axis = program.inputs[0].dims[0].axis
        self.peers = mesh.along(axis) if axis else [mesh]  # that share the tokens
        self.own_tokens = -(-max_tokens // len(self.peers))
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = []
        self.matrices: list[MatrixKey] = []
        self.vectors: list[VectorKey] = []
        self.values: dict[str, Pending] = {}  # of the program, by name
        self.slots = self.layer_steps = 0
        self.attention: dict[int, LayerAttention] = {}
        self.scaled: Value | None = None  # by the step that embeds
        self.key_places: tuple[int, ...] = ()  # of the layer at hand
        self.exchange_floats = 1
        self.readers: dict[str, list[Instr]] = {}
        for instr in program.instrs:
            for v in instr.inputs:
                self.readers.setdefault(v.name, []).append(instr)

    def run(self) -> Lowered:
        """The steps of the whole program; see `lower`."""
        first_layer = self.program.boundaries[1] if len(self.program.boundaries) > 1 else None
        for instr in self.program.instrs:
            handler = getattr(self, instr.op, None)
            if handler is None:
                raise LayoutError(f"cannot lower {instr.op}: {instr}")
            handler(instr)
            if first_layer in instr.outputs:
                self.layer_steps = len(self.steps)
        arena_bytes = self._place()
        return Lowered(
            self.steps,
            self.buffers,
            self.matrices,
            self.vectors,
            arena_bytes,
            self.exchange_floats,
            self.attention,
            self.layer_steps,
            len(self.peers) > 1,
        )

    # Operands

    def _buffer(self, kind: str, width: int, **more: Any) -> int:
        """Adds a buffer; returns its index."""
        self.buffers.append(Buffer(kind, width, **more))
        return len(self.buffers) - 1

    def _slot(self, width: int, rows: int, most: int = 0, lead: int = 0, taken: bool = False) -> int:
        """A buffer in the next exchange slot; `most`: its width on the rank where that is largest."""
        self.exchange_floats = max(self.exchange_floats, rows * max(width, most))
        return self._buffer("slot", width, place=self.slots % SLOTS, lead=lead, rows=rows, taken=taken)

    def _outputs(self, instr: Instr) -> list[int]:
        """The buffers that a linear or embed writes: in an exchange slot what is partial, or is exchanged next."""
        rows = self.own_tokens if instr.outputs[0].dims[0].axis else self.max_tokens
        taken = _taken(instr.outputs[0])
        widths = [v.dims[-1].local(self.mesh) for v in instr.outputs]
        if instr.outputs[0].partial and len(self.peers) > 1:  # over hosts, whose ranks share the tokens
            results = [self._buffer("sums", widths[0], place=self.slots % SLOTS, rows=self.max_tokens, taken=taken)]
            self.exchange_floats = max(self.exchange_floats, self.max_tokens * widths[0])
        elif instr.outputs[0].partial:
            results = [self._slot(widths[0], rows, taken=taken)]
        elif self._next(instr.outputs[-1]).op == "all_to_all":  # side by side in one row
            widths = [sum(end - begin for begin, end in self._pieces(v.dims[-1])) for v in instr.outputs]
            reader = self._next(instr.outputs[0])
            squares = reader.outputs[0].dims[-1].count if reader.op == "sum_squares" else 0
            row = sum(widths) + squares
            results = [self._slot(row, rows, lead=sum(widths[:i])) for i in range(len(widths))]
        else:
            return [self._buffer("arena", width, rows=rows, taken=taken) for width in widths]
        self.slots += 1
        return results

    def _shares(self, dim: Dim) -> list[Range]:
        """The elements of a dimension that the weights of each rank have: this rank's, where decode shards it
        likewise, else those of the ranks that share the tokens.
        """
        stored = self.stored.get(dim, dim)
        meshes = [self.mesh] if dim.axis == stored.axis else self.peers
        return [stored.span(mesh) for mesh in meshes]

    def _pieces(self, dim: Dim) -> list[Range]:
        """Shares that cover a dimension: each once where ranks have the same one, and no empty ones unless there is
        no other.
        """
        shares = dict.fromkeys(self._shares(dim))
        return [s for s in shares if s[0] < s[1]] or list(shares)[:1]

    def _matrices(self, keys: list[MatrixKey]) -> int:
        """The first index of matrices that stand one after another."""
        return _consecutive(self.matrices, keys)

    def _vectors(self, w: Weight | None, shares: list[Range]) -> int:
        """The first index of a vector's shares; -1 where there is no vector."""
        return -1 if w is None else _consecutive(self.vectors, [(w.name, share) for share in shares])

    def _vector(self, w: Weight | None) -> int:
        """The index of this rank's part of a vector; -1 where there is none."""
        return -1 if w is None else self._vectors(w, [w.dims[0].span(self.mesh)])

    def _at(self, value: Value) -> int:
        """The buffer of a value that has one. LayoutError where it is not written anywhere yet."""
        found = self.values[value.name]
        if not isinstance(found, int):
            raise LayoutError(f"cannot lower %{value.name}: its reader needs it in memory")
        return found

    def _head(self, value: Value) -> Head:
        """A value on its way to attention; what nothing norms or rotates is in memory."""
        found = self.values[value.name]
        return found if isinstance(found, Head) else Head(self._at(value))

    def _residual(self, value: Value) -> Residual:
        """A value as a residual. LayoutError where it is normed already."""
        found = self.values[value.name]
        if isinstance(found, int):
            return Residual(-1, found, stored=self._stored(found))
        if not isinstance(found, Residual):
            raise LayoutError(f"cannot lower %{value.name}: it was normed, and its reader needs it as it was")
        return found

    # Instructions, by op name

    def embed(self, i: Instr) -> None:
        """A step of its own, with the scale that follows."""
        # Only one rank's part of a row is not zero, so the scale that follows the sum may as well precede it.
        reader = self._next(i.outputs[0])
        if reader.op == "all_reduce":
            reader = self._next(reader.outputs[0])
        factor = reader.attrs["factor"] if reader.op == "scale" else 1.0
        self.scaled = reader.outputs[0] if reader.op == "scale" else None
        (out,) = self._outputs(i)
        table = i.weight(0)
        pieces, columns = self._pieces(table.dims[0]), (0, table.dims[1].elements)
        matrix = self._matrices([(table.name, rows, columns) for rows in pieces])
        self.steps.append(
            Step(
                "embed",
                outputs=[out],
                matrices=[matrix],
                counts=_several(len(pieces)),
                ints=[pieces[0][0]],
                floats=[factor],
            )
        )
        self.values[i.outputs[0].name] = out

    def all_reduce(self, i: Instr) -> None:
        """No step: the ranks' parts are read in place."""
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def all_gather(self, i: Instr) -> None:
        """A step where tokens are sharded; else none."""
        source = self.values[i.inputs[0].name]
        if i.inputs[0].dims[0].axis:
            source = self._gather_rows(i.inputs[0])
        self.values[i.outputs[0].name] = source  # logits are written where rank 0 reads them

    def _gather_rows(self, value: Value) -> int:
        """Emits what puts the rows of outputs where all ranks read them; returns the buffer of all."""
        r, width = self._residual(value), value.dims[-1].elements
        out = self._slot(width, self.max_tokens)
        self.slots += 1
        step = Step("share", x=r.x, y=r.y, outputs=[out], vectors=[r.post_norm], floats=_factors(r.eps, r.factor))
        if r.stored >= 0:
            step.x, step.y, step.vectors, step.floats = -1, r.stored, [-1], [r.eps]
        self.steps.append(step)
        return self._buffer("outputs", width, place=self.buffers[out].place, rows=self.max_tokens, taken=True)

    def sum_squares(self, i: Instr) -> None:
        """A step; its sums stand behind queries, keys and values where these are exchanged."""
        q, k = (self._at(value) for value in i.inputs)
        count, source = i.outputs[0].dims[-1].count, self.buffers[q]
        if source.kind == "slot":
            out = self._buffer("slot", source.width, place=source.place, lead=source.width - count, rows=source.rows)
        else:
            (out,) = self._outputs(i)
        attend = next(r for r in self.program.instrs[self.program.instrs.index(i) :] if r.op == "attend")
        self.steps.append(Step("squares", x=q, y=k, outputs=[out], ints=[attend.attrs["layer"]]))
        keys = i.inputs[1].dims[-1]
        heads = [e // keys.width for begin, end in self._pieces(keys) for e in range(begin, end, keys.width)]
        self.key_places = tuple(map(heads.index, range(keys.count))) if source.kind == "slot" else ()
        if source.kind == "slot":  # as attention reads it
            out = self._buffer("tokens", source.width, place=source.place, lead=source.width - count, rows=source.rows)
        self.values[i.outputs[0].name] = out

    def rms_norm_heads(self, i: Instr) -> None:
        """No step: attention norms."""
        squares = self._at(i.inputs[2])
        for x, w, y in zip(i.inputs[:2], (i.weight(0), i.weight(1)), i.outputs, strict=True):
            (dim,) = w.dims
            norm = self._vectors(w, [self.stored.get(dim, dim).span(self.mesh)])
            self.values[y.name] = Head(self._at(x), norm, i.attrs["eps"], squares=squares)

    def all_to_all(self, i: Instr) -> None:
        """No step: each reader finds the rows in their rank's slot."""
        for x, y in zip(i.inputs, i.outputs, strict=True):
            source = self.values[x.name]
            slot = self.buffers[source.buffer if isinstance(source, Head) else self._at(x)]
            if x.dims[0].axis:  # to all tokens of own heads
                own = y.dims[-1].span(self.mesh)
                pieces = self._pieces(x.dims[-1])
                before = sum(end - begin for begin, end in pieces[: pieces.index(own)]) if own in pieces else 0
                view = replace(slot, kind="tokens", lead=slot.lead + before)
            else:
                view = replace(slot, kind="columns", width=y.dims[-1].local(self.mesh), rows=self.own_tokens)
            self.buffers.append(view)
            at = len(self.buffers) - 1
            self.values[y.name] = replace(source, buffer=at) if isinstance(source, Head) else at

    def scale(self, i: Instr) -> None:
        """No step: `embed` has scaled, or the next `prepare` does."""
        source = self.values[i.inputs[0].name]
        if i.outputs[0] is not self.scaled:
            if isinstance(source, int):
                source = Residual(-1, source)
            if isinstance(source, Head) or (isinstance(source, Residual) and source.x >= 0):
                raise LayoutError(f"cannot lower a scale of what was added or rotated: {i}")
            source = replace(source, factor=source.factor * i.attrs["factor"])
        self.values[i.outputs[0].name] = source

    def soft_cap(self, i: Instr) -> None:
        """No step: the linear before it caps."""
        self.steps[-1].floats[1] = i.attrs["cap"]
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def take(self, i: Instr) -> None:
        """No step: the reader finds the rows."""
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def rms_norm(self, i: Instr) -> None:
        """No step: its reader norms."""
        source, norm = i.inputs[0], self._vector(i.weights[0])
        eps, reader = i.attrs["eps"], self._next(i.outputs[0])
        if reader.op == "scale":
            reader = self._next(reader.outputs[0])
        if reader.op in ("rope", "attend"):
            result = Head(self._at(source), norm, eps)
        elif reader.op == "add":
            result = Residual(-1, self._at(source), norm, eps)
        elif reader.op == "linear":
            residual = self._residual(source)
            result = Normed(residual, norm, eps, len(self.readers[source.name]) > 1)
            self.values[source.name] = residual  # the next add finds where it was stored
        else:
            raise LayoutError(f"cannot lower rms_norm read by {reader.op}: {i}")
        self.values[i.outputs[0].name] = result

    def _stored(self, buffer: int) -> int:
        """A plain arena buffer is its own store; the parts in a slot have none yet."""
        return buffer if self.buffers[buffer].kind == "arena" else -1

    def add(self, i: Instr) -> None:
        """No step: the next `prepare` adds."""
        x, y = (self.values[v.name] for v in i.inputs)
        if not isinstance(x, Residual) or x.stored < 0:
            raise LayoutError(f"cannot lower an add whose first operand was not normed before: {i}")
        if isinstance(y, int):
            y = Residual(-1, y)
        if not isinstance(y, Residual):
            raise LayoutError(f"cannot lower an add whose second operand is not a sum: {i}")
        self.values[i.outputs[0].name] = Residual(x.stored, y.y, y.post_norm, y.eps, factor=y.factor)

    def linear(self, i: Instr) -> None:
        """What prepares its input, and a step for all its matrices."""
        matrices, biases = i.matrices, i.weights[len(i.weights) // 2 :]
        out_dim, in_dim = matrices[0].dims
        columns = self._shares(in_dim)
        added = len(set(columns)) > 1  # shards of a whole matrix whose columns are sharded
        taken, own = _taken(i.inputs[0]), _taken(i.inputs[0]) and i.inputs[0].dims[0].axis is not None
        inputs = self._prepare(i.inputs[0], taken, own, [w.name for w in matrices], columns if added else columns[:1])
        reader = self._reader(i.outputs[0])
        final = reader is None or reader.op in ("soft_cap", "all_gather")
        if final:
            outputs = [self._buffer("logits", out_dim.local(self.mesh), place=out_dim.share(self.mesh)[0])]
        else:
            outputs = self._outputs(i)
        step = Step("linear", taken, own, inputs=inputs, outputs=outputs, ints=[0, 0], floats=[0.0, 0.0])
        if reader is not None and reader.op == "gated":
            step.ints = [1, GATES[reader.attrs["function"]]]
        adds_bias = in_dim.axis is None or self.mesh.index(in_dim.axis) == 0
        for w, bias in zip(matrices, biases, strict=True):
            pieces = columns if added else self._pieces(w.dims[0])
            keys: list[MatrixKey] = [
                (w.name, (0, w.dims[0].elements), p) if added else (w.name, p, columns[0]) for p in pieces
            ]
            step.matrices.append(self._matrices(keys))
            step.vectors.append((self._vector(bias) if added else self._vectors(bias, pieces)) if adds_bias else -1)
            step.counts += [len(pieces)] if self.stored else []
        step.ints += [1] if added else []
        self.steps.append(step)
        self.values.update((v.name, out) for v, out in zip(i.outputs, outputs, strict=True))

    def _prepare(self, value: Value, taken: bool, own: bool, names: list[str], shares: list[Range]) -> list[int]:
        """Emits the prepare of a linear's input; returns each matrix's activation buffer, the first of one for each
        share of the columns.
        """
        step = Step(
            "prepare",
            taken,
            own,
            outputs=[-1, -1, -1, -1],
            vectors=[-1, -1],
            counts=_several(len(shares)),
            floats=[0.0],
        )
        source = self.values[value.name]
        read_again = any(reader.op in ("add", "take") for reader in self.readers[value.name])
        if isinstance(source, Residual) or (isinstance(source, int) and read_again):  # the residual stream as it is
            r = self.values[value.name] = self._residual(value)
            source = Normed(r, -1, r.eps, read_again)
        if isinstance(source, Normed):
            r = source.residual
            step.vectors = [r.post_norm, source.norm]
            step.floats = _factors(source.eps, r.factor if r.stored < 0 else 1.0, source.factor)
            if r.stored >= 0:  # written by an earlier prepare, or a whole value to begin with
                step.y, step.vectors[0] = r.stored, -1
            else:
                step.x, step.y = r.x, r.y
                if source.read_again:
                    r.stored = step.outputs[0] = self._buffer(
                        "arena", self.buffers[r.y].width, rows=self.own_tokens, taken=taken
                    )
        else:
            step.y = self._at(value)
        self.steps.append(step)
        return [self._activations(step, name, shares) for name in names]

    def _activations(self, prepare: Step, name: str, shares: list[Range]) -> int:
        """The buffers, of one for each share of the columns the first, in which `prepare` leaves what matrix `name`
        reads: whole blocks of its type.
        """
        block, fmt = self.block_columns(name), self.formats(name)
        rows = self.max_tokens if prepare.outputs_only and not prepare.own else self.own_tokens
        prepared = []
        for begin, end in shares:
            first, last = begin // block * block, -(-end // block) * block
            prepared.append(
                Buffer(
                    "activations",
                    last - first if begin < end else 0,
                    format=fmt,
                    lead=begin - first,
                    floats=end - begin,
                    rows=rows,
                )
            )
        if prepare.outputs[1 + fmt] < 0:
            prepare.outputs[1 + fmt] = len(self.buffers)
            self.buffers += prepared
        place = prepare.outputs[1 + fmt]
        assert self.buffers[place : place + len(shares)] == prepared, (
            "matrices that read one input have the same columns"
        )
        return place

    def low_rank(self, i: Instr) -> None:
        """All A beside the matrices that they add to, in their step; then their results, prepared, times each B,
        into the same values.
        """
        prepare, base = self.steps[-2:]
        if base.op != "linear" or prepare.op != "prepare":
            raise LayoutError(f"cannot lower a low_rank that does not follow its linear: {i}")
        count = len(i.outputs)
        weights = [i.weight(index) for index in range(2 * count)]
        a, b = weights[:count], weights[count:]
        columns = self._shares(a[0].dims[1])[0]
        rows = sum(-(-w.dims[0].count // RANK_UNIT) * RANK_UNIT for w in a)
        taken = base.outputs_only
        low = self._buffer("arena", rows, taken=taken)
        outputs = list(base.outputs)
        gates = [r.attrs["function"] for v in i.outputs if (r := self._reader(v)) is not None and r.op == "gated"]
        base.inputs.append(self._activations(prepare, a[0].name, [columns]))
        base.outputs.append(low)
        base.matrices.append(self._matrices([(tuple(w.name for w in a), (0, rows), columns)]))
        base.vectors.append(-1)
        base.ints = [0, 0, 0, 1]
        second = Step("prepare", taken, outputs=[-1, -1, -1, -1], y=low, vectors=[-1, -1], floats=[0.0])
        self.steps.append(second)
        inputs, matrices = [self._activations(second, b[0].name, [(0, rows)])], [-1] * len(outputs)
        for value, w in zip(i.inputs[1:], b, strict=True):
            low_rows, low_columns = (self._shares(dim)[0] for dim in w.dims)
            matrices[outputs.index(self._at(value))] = self._matrices([(w.name, low_rows, low_columns)])
        self.steps.append(
            Step(
                "low_rank",
                taken,
                inputs=inputs,
                outputs=outputs,
                matrices=matrices,
                ints=[1, GATES[gates[0]]] if gates else [0, 0],
            )
        )
        self.values.update((v.name, self.values[old.name]) for old, v in zip(i.inputs[1:], i.outputs, strict=True))

    def gated(self, i: Instr) -> None:
        """No step: the linear before it multiplies."""
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def rope(self, i: Instr) -> None:
        """No step: attention rotates."""
        source = self.values[i.inputs[0].name]
        head = source if isinstance(source, Head) else Head(self._at(i.inputs[0]))
        self.values[i.outputs[0].name] = replace(head, table=i.attrs["table"])

    def attend(self, i: Instr) -> None:
        """One step with norms, rotation and cache."""
        q, k, v = self._head(i.inputs[0]), self._head(i.inputs[1]), self._at(i.inputs[2])
        heads, a, rotated = i.outputs[0].dims[-1], i.attrs, -1
        width = heads.local(self.mesh)
        if self._next(i.outputs[0]).op == "all_to_all":
            rotated = self._buffer("arena", i.inputs[0].dims[-1].local(self.mesh))
            out = self._slot(width, self.max_tokens, max(heads.local(mesh) for mesh in self.peers))
            self.slots += 1
        else:
            out = self._buffer("arena", width)
        self.steps.append(
            Step(
                "attend",
                x=rotated,
                y=q.squares,
                outputs=[q.buffer, k.buffer, v, out],
                vectors=[q.norm, k.norm],
                ints=[a["layer"], ROPE_TABLES[q.table] if q.table else NO_ROPE, a["window"]],
                floats=[q.eps, a["scale"], a["soft_cap"]],
            )
        )
        self.attention[a["layer"]] = replace(layer_attention(i, self.mesh), key_places=self.key_places)
        self.values[i.outputs[0].name] = out

    def _next(self, value: Value) -> Instr:
        """The first reader of a value. LayoutError where it has none."""
        reader = self._reader(value)
        if reader is None:
            raise LayoutError(f"cannot lower %{value.name}: nothing reads it")
        return reader

    def _reader(self, value: Value) -> Instr | None:
        """The first reader of a value, or None."""
        return next(iter(self.readers.get(value.name, ())), None)

    # Memory

    def _place(self) -> int:
        """Gives arena buffers and activations their offsets; returns the arena's bytes.

        Time is counted in phases, the stretches between barriers: a small batch's prepare has no barrier of its own, so
        it shares its phase with the linear that follows, and nothing written in a phase may lie on what is read in it.
        """
        uses, phase = [], 0
        for step in self.steps:
            uses += [(phase, b) for b in step.operands() if b >= 0 and self.buffers[b].kind in ("arena", "activations")]
            phase += step.op != "prepare"
        offsets, total = first_fit(uses, lambda b: self._bytes(self.buffers[b]))
        for b, offset in offsets.items():
            self.buffers[b] = replace(self.buffers[b], place=offset)
        return total

    def _bytes(self, buffer: Buffer) -> int:
        """Bytes of a buffer in the arena, a multiple of ROW_ALIGN."""
        if buffer.kind == "arena":
            row = 4 * buffer.width
        else:
            row = native.check(native.lib.ckdist_activation_bytes(buffer.format, buffer.width))
        return -(-row * (buffer.rows or self.max_tokens) // ROW_ALIGN) * ROW_ALIGN


def _consecutive(known: list[Key], keys: list[Key]) -> int:
    """Where `keys` stand one after another in `known`; they are added where they do not.

    Only a single one is worth looking for.
    """
    if len(keys) == 1 and keys[0] in known:
        return known.index(keys[0])
    known += keys
    return len(known) - len(keys)


def _taken(value: Value) -> bool:
    """Whether a value's rows are outputs, not tokens."""
    return value.dims[0].name == "outputs"


def layer_attention(i: Instr, mesh: Mesh) -> LayerAttention:
    """What an attend means on a rank of `mesh`."""
    heads, keys, values = (x.dims[-1] for x in i.inputs)
    group = heads.count // keys.count
    begin, end = heads.share(mesh)
    each = (min(end, (kv + 1) * group) - max(begin, kv * group) for kv in range(*keys.share(mesh)))
    return LayerAttention(tuple(each), keys.width, values.width, heads.count, keys.count, begin)


def stored_dims(tokens: Program, tensors: Program) -> dict[Dim, Dim]:
    """For `lower`, of a program whose tokens are sharded: how its weights' dimensions are sharded in `tensors`, which
    says what the ranks hold.
    """
    held = {w.name: w.dims for w in tensors.weights}
    return {dim: own for w in tokens.weights for dim, own in zip(w.dims, held[w.name], strict=True)}


def _factors(eps: float, *factors: float) -> list[float]:
    """The `floats` of a step that norms; factors stand there unless all are 1."""
    return [eps, *factors] if any(factor != 1.0 for factor in factors) else [eps]


def _several(count: int) -> list[int]:
    """The `counts` of an operand that stands for `count`; none for one."""
    return [count] if count > 1 else []


def lower(
    program: Program,
    mesh: Mesh,
    formats: Callable[[str], int],
    block_columns: Callable[[str], int],
    max_tokens: int,
    stored: Mapping[Dim, Dim] | None = None,
) -> Lowered:
    """The steps of this rank.

    `stored`, for a program whose tokens are sharded: its weights' dimensions as they are sharded in the ranks' memory.

    `formats(weight name)` is the activation format (0 f32, 1 bf16, 2 q8) that its kernel reads, `block_columns(weight
    name)` the columns of one of its blocks. Raises LayoutError for a program that the replay has no step for.
    """
    return _Lowering(program, mesh, formats, block_columns, max_tokens, stored or {}).run()

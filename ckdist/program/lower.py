"""Lowering: a program becomes the short list of steps that the native replay walks.

Ops are fused to what one pass over memory can do between two barriers: residual sum + norms + preparation of
activations (`prepare`), all matrices that read one input + bias + gate (`linear`), q/k norms + rotation + cache +
attention (`attend`). An all_reduce becomes no step: the ranks' parts are read in place by the `prepare` that follows.
Matching is local and total: an instruction that fits no pattern is an error here, before the first token.

Where tokens are cut, a whole matrix is read through the shards that the ranks of the host hold for decode: side by side
where its rows are cut, as a sum of products, in the order of the ranks, where its columns are. The sum's order and the
products are those of TENSOR, so both give the same bits. An all_to_all becomes no step either: queries, keys and values
are read where their tokens' rank wrote them, outputs of attention where their heads' rank did.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.layout import Dim, Mesh
from ckdist.program.arena import first_fit
from ckdist.program.lowered import GATES, RANK_UNIT, ROPE_TABLES, SLOTS, Buffer, Lowered, Step
from ckdist.program.program import Instr, Program, Value, Weight

ROW_ALIGN = 64


@dataclass
class _Residual:
    """x + norm(sum of y), not yet written anywhere: it becomes a buffer in the prepare of its first reader."""

    x: int  # buffer or -1
    y: int  # buffer
    post_norm: int = -1
    eps: float = 0.0
    stored: int = -1


@dataclass
class _Normed:
    residual: _Residual
    norm: int
    eps: float
    read_again: bool  # the residual, by an add


@dataclass
class _Head:
    """q, k or v of a layer on its way to attention."""

    buffer: int
    norm: int = -1
    eps: float = 0.0
    table: str = ""


class _Lowering:
    def __init__(
        self, program: Program, mesh: Mesh, formats, block_columns, max_tokens: int, stored: Mapping[str, Dim]
    ):
        self.program, self.mesh, self.max_tokens, self.stored = program, mesh, max_tokens, stored
        self.formats, self.block_columns = formats, block_columns
        axis = program.inputs[0].dims[0].axis
        self.peers = mesh.along(axis) if axis else [mesh]  # that share the tokens
        self.own_tokens = -(-max_tokens // len(self.peers))
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = []
        self.matrices: list[tuple] = []
        self.vectors: list[tuple] = []
        self.values: dict[str, object] = {}  # program value -> buffer index or one of the pending forms
        self.slots = self.layer_steps = 0
        self.exchange_floats = 1
        self.readers: dict[str, list[Instr]] = {}
        for instr in program.instrs:
            for v in instr.inputs:
                self.readers.setdefault(v.name, []).append(instr)

    def run(self) -> Lowered:
        first_layer = self.program.boundaries[1] if len(self.program.boundaries) > 1 else None
        for instr in self.program.instrs:
            getattr(self, instr.op)(instr)
            if first_layer in instr.outputs:
                self.layer_steps = len(self.steps)
        arena_bytes = self._place()
        tokens_cut = len(self.peers) > 1
        return Lowered(
            self.steps,
            self.buffers,
            self.matrices,
            self.vectors,
            arena_bytes,
            self.exchange_floats,
            self.layer_steps,
            tokens_cut,
        )

    # Operands

    def _buffer(self, kind: str, width: int, **more) -> int:
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
        elif self._reader(instr.outputs[0]).op == "all_to_all":  # side by side in one row
            widths = [sum(end - begin for begin, end in self._pieces(v.dims[-1])) for v in instr.outputs]
            results = [self._slot(sum(widths), rows, lead=sum(widths[:i])) for i in range(len(widths))]
        else:
            return [self._buffer("arena", width, rows=rows, taken=taken) for width in widths]
        self.slots += 1
        return results

    def _shares(self, dim: Dim) -> list[tuple[int, int]]:
        """The elements of a dimension that the weights of each rank have: this rank's, where decode cuts it
        likewise, else those of the ranks that share the tokens.
        """
        stored = self.stored.get(dim.name, dim)
        meshes = [self.mesh] if dim.axis == stored.axis else self.peers
        return [tuple(edge * stored.width for edge in stored.share(mesh)) for mesh in meshes]

    def _pieces(self, dim: Dim) -> list[tuple[int, int]]:
        """Shares that cover a dimension: each once where ranks have the same one, and no empty ones unless there is
        no other.
        """
        shares = dict.fromkeys(self._shares(dim))
        return [s for s in shares if s[0] < s[1]] or list(shares)[:1]

    def _matrices(self, keys: list[tuple]) -> int:
        """The first index of matrices that stand one after another."""
        return _consecutive(self.matrices, keys)

    def _vectors(self, w: Weight | None, shares: list[tuple[int, int]]) -> int:
        if w is None:
            return -1
        return _consecutive(self.vectors, [(w.name, share) for share in shares])

    def _vector(self, w: Weight | None) -> int:
        return (
            -1
            if w is None
            else self._vectors(w, [tuple(edge * w.dims[0].width for edge in w.dims[0].share(self.mesh))])
        )

    # Instructions, by op name

    def embed(self, i: Instr) -> None:
        # Only one rank's part of a row is not zero, so the scale that follows the sum may as well precede it.
        reader = self._reader(i.outputs[0])
        if reader.op == "all_reduce":
            reader = self._reader(reader.outputs[0])
        factor = reader.attrs["factor"] if reader.op == "scale" else 1.0
        (out,) = self._outputs(i)
        table = i.weights[0]
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
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def all_gather(self, i: Instr) -> None:
        source = self.values[i.inputs[0].name]
        if i.inputs[0].dims[0].axis:
            source = self._share(source, i.inputs[0].dims[-1].elements)
        self.values[i.outputs[0].name] = source  # logits are written where rank 0 reads them

    def _share(self, source, width: int) -> int:
        """Emits what puts the rows of outputs where all ranks read them; returns the buffer of all."""
        r = source if isinstance(source, _Residual) else _Residual(-1, source, stored=self._stored(source))
        out = self._slot(width, self.max_tokens)
        self.slots += 1
        step = Step("share", x=r.x, y=r.y, outputs=[out], vectors=[r.post_norm], floats=[r.eps])
        if r.stored >= 0:
            step.x, step.y, step.vectors = -1, r.stored, [-1]
        self.steps.append(step)
        return self._buffer("outputs", width, place=self.buffers[out].place, rows=self.max_tokens, taken=True)

    def all_to_all(self, i: Instr) -> None:
        for x, y in zip(i.inputs, i.outputs):
            slot = self.buffers[self.values[x.name]]
            if x.dims[0].axis:  # to all tokens of own heads
                own = tuple(edge * y.dims[-1].width for edge in y.dims[-1].share(self.mesh))
                pieces = self._pieces(x.dims[-1])
                before = sum(end - begin for begin, end in pieces[: pieces.index(own)]) if own in pieces else 0
                view = replace(slot, kind="tokens", lead=slot.lead + before)
            else:
                view = replace(slot, kind="columns", width=y.dims[-1].local(self.mesh), rows=self.own_tokens)
            self.buffers.append(view)
            self.values[y.name] = len(self.buffers) - 1

    def scale(self, i: Instr) -> None:
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def soft_cap(self, i: Instr) -> None:
        self.steps[-1].floats[1] = i.attrs["cap"]
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def take(self, i: Instr) -> None:
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]  # whoever reads it finds the rows

    def rms_norm(self, i: Instr) -> None:
        source, norm = self.values[i.inputs[0].name], self._vector(i.weights[0])
        eps, reader = i.attrs["eps"], self._reader(i.outputs[0])
        if reader.op == "rope":
            result = _Head(source, norm, eps)
        elif reader.op == "add":
            result = _Residual(-1, source, norm, eps)
        elif reader.op == "linear":
            residual = source if isinstance(source, _Residual) else _Residual(-1, source, stored=self._stored(source))
            result = _Normed(residual, norm, eps, len(self.readers[i.inputs[0].name]) > 1)
            if isinstance(source, int):
                self.values[i.inputs[0].name] = residual  # the next add finds where it was stored
        else:
            raise LayoutError(f"cannot lower rms_norm read by {reader.op}: {i}")
        self.values[i.outputs[0].name] = result

    def _stored(self, buffer: int) -> int:
        """A plain arena buffer is its own store; the parts in a slot have none yet."""
        return buffer if self.buffers[buffer].kind == "arena" else -1

    def add(self, i: Instr) -> None:
        x, y = (self.values[v.name] for v in i.inputs)
        if not isinstance(x, _Residual) or x.stored < 0:
            raise LayoutError(f"cannot lower an add whose first operand was not normed before: {i}")
        if isinstance(y, int):
            y = _Residual(-1, y)
        self.values[i.outputs[0].name] = _Residual(x.stored, y.y, y.post_norm, y.eps)

    def linear(self, i: Instr) -> None:
        matrices, biases = i.weights[: len(i.weights) // 2], i.weights[len(i.weights) // 2 :]
        out_dim, in_dim = matrices[0].dims
        source = self.values[i.inputs[0].name]
        columns = self._shares(in_dim)
        added = len(set(columns)) > 1  # shards of a whole matrix whose columns are cut
        taken, own = _taken(i.inputs[0]), _taken(i.inputs[0]) and i.inputs[0].dims[0].axis is not None
        inputs = self._prepare(source, taken, own, [w.name for w in matrices], columns if added else columns[:1])
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
        for w, bias in zip(matrices, biases):
            pieces = columns if added else self._pieces(w.dims[0])
            keys = [(w.name, (0, w.dims[0].elements), p) if added else (w.name, p, columns[0]) for p in pieces]
            step.matrices.append(self._matrices(keys))
            step.vectors.append((self._vector(bias) if added else self._vectors(bias, pieces)) if adds_bias else -1)
            step.counts += [len(pieces)] if self.stored else []
        step.ints += [1] if added else []
        self.steps.append(step)
        self.values.update((v.name, out) for v, out in zip(i.outputs, outputs))

    def _prepare(self, source, taken: bool, own: bool, names: list[str], shares: list[tuple[int, int]]) -> list[int]:
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
        if isinstance(source, _Normed):
            r = source.residual
            step.vectors = [r.post_norm, source.norm]
            step.floats = [source.eps]
            if r.stored >= 0:  # written by an earlier prepare, or a whole value to begin with
                step.y, step.vectors[0] = r.stored, -1
            else:
                step.x, step.y = r.x, r.y
                if source.read_again:
                    r.stored = step.outputs[0] = self._buffer(
                        "arena", self.buffers[r.y].width, rows=self.own_tokens, taken=taken
                    )
        else:
            step.y = source
        self.steps.append(step)
        return [self._activations(step, name, shares) for name in names]

    def _activations(self, prepare: Step, name: str, shares: list[tuple[int, int]]) -> int:
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
        a, b = i.weights[:count], i.weights[count:]
        columns = self._shares(a[0].dims[1])[0]
        rows = sum(-(-w.dims[0].size // RANK_UNIT) * RANK_UNIT for w in a)
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
        for value, w in zip(i.inputs[1:], b):
            matrices[outputs.index(self.values[value.name])] = self._matrices(
                [(w.name, *(self._shares(dim)[0] for dim in w.dims))]
            )
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
        self.values.update((v.name, self.values[old.name]) for old, v in zip(i.inputs[1:], i.outputs))

    def gated(self, i: Instr) -> None:
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def rope(self, i: Instr) -> None:
        source = self.values[i.inputs[0].name]
        head = source if isinstance(source, _Head) else _Head(source)
        self.values[i.outputs[0].name] = _Head(head.buffer, head.norm, head.eps, i.attrs["table"])

    def attend(self, i: Instr) -> None:
        q, k, v = (self.values[value.name] for value in i.inputs)
        heads, a, rotated = i.outputs[0].dims[-1], i.attrs, -1
        width = heads.local(self.mesh)
        if self._reader(i.outputs[0]).op == "all_to_all":
            rotated = self._buffer("arena", width)
            out = self._slot(width, self.max_tokens, max(heads.local(mesh) for mesh in self.peers))
            self.slots += 1
        else:
            out = self._buffer("arena", width)
        self.steps.append(
            Step(
                "attend",
                x=rotated,
                outputs=[q.buffer, k.buffer, v, out],
                vectors=[q.norm, k.norm],
                ints=[a["layer"], ROPE_TABLES[q.table], a["window"]],
                floats=[q.eps, a["scale"], a["soft_cap"]],
            )
        )
        self.values[i.outputs[0].name] = out

    def _reader(self, value: Value) -> Instr | None:
        readers = self.readers.get(value.name, [])
        return readers[0] if readers else None

    # Memory

    def _place(self) -> int:
        """Gives arena buffers and activations their offsets; returns the arena's bytes.

        Time is counted in phases, the stretches between barriers: a small batch's prepare has no barrier of its own, so
        it shares its phase with the linear that follows, and nothing written in a phase may lie on what is read in it.
        """
        uses, phase = [], 0
        for step in self.steps:
            uses += [(phase, b) for b in _operands(step) if b >= 0 and self.buffers[b].kind in ("arena", "activations")]
            phase += step.op != "prepare"
        offsets, total = first_fit(uses, lambda b: self._bytes(self.buffers[b]))
        for b, offset in offsets.items():
            self.buffers[b] = replace(self.buffers[b], place=offset)
        return total

    def _bytes(self, buffer: Buffer) -> int:
        if buffer.kind == "arena":
            row = 4 * buffer.width
        else:
            row = native.check(native.lib.ckdist_activation_bytes(buffer.format, buffer.width))
        return -(-row * (buffer.rows or self.max_tokens) // ROW_ALIGN) * ROW_ALIGN


def _consecutive(known: list[tuple], keys: list[tuple]) -> int:
    """Where `keys` stand one after another in `known`; they are added where they do not.

    Only a single one is worth looking for.
    """
    if len(keys) == 1 and keys[0] in known:
        return known.index(keys[0])
    known += keys
    return len(known) - len(keys)


def _taken(value: Value) -> bool:
    return value.dims[0].name == "outputs"


def _several(count: int) -> list[int]:
    return [count] if count > 1 else []


def _operands(step: Step) -> list[int]:
    """Every buffer that a step reads or writes, -1 among them."""
    more = range(1, step.counts[0]) if step.counts else ()
    prepared = [first + k for first in step.outputs[1:] if first >= 0 for k in more] if step.op == "prepare" else []
    added = [step.inputs[0] + k for k in more] if step.op == "linear" and any(step.ints[2:3]) else []
    return [step.x, step.y, *step.inputs, *step.outputs, *prepared, *added]


def lower(
    program: Program, mesh: Mesh, formats, block_columns, max_tokens: int, stored: Mapping[str, Dim] | None = None
) -> Lowered:
    """The steps of this rank.

    `stored`, for a program whose tokens are cut: the dimensions as they are cut in the ranks' memory.

    `formats(weight name)` is the activation format (0 f32, 1 bf16, 2 q8) that its kernel reads, `block_columns(weight
    name)` the columns of one of its blocks. Raises LayoutError for a program that the replay has no step for.
    """
    return _Lowering(program, mesh, formats, block_columns, max_tokens, stored or {}).run()

"""Lowering: a program becomes the short list of steps that the native replay walks.

Ops are fused to what one pass over memory can do between two barriers: residual sum + norms + preparation of activations
(`prepare`), all matrices that read one input + bias + gate (`linear`), q/k norms + rotation + cache + attention (`attend`).
An all_reduce becomes no step: the ranks' parts are read in place by the `prepare` that follows. Matching is local and
total: an instruction that fits no pattern is an error here, before the first token.
"""

from dataclasses import dataclass, field

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.layout import Mesh
from ckdist.program.program import Instr, Program, Value, Weight

GATES = {"silu": 0, "gelu_tanh": 1}
ROPE_TABLES = {"global": 0, "local": 1}
ROW_ALIGN = 64
RANK_UNIT = 16  # low ranks are computed in whole tiles, and the next matrix reads them at the beginning of a cache line
SLOTS = 2  # partial values alternate between this many exchange buffers


@dataclass(frozen=True)
class Buffer:
    """Where a step's value lives. `kind` is arena, slot, logits or activations; `width` in floats (activations: columns)."""

    kind: str
    width: int
    place: int = 0
    format: int = 0
    lead: int = 0


@dataclass
class Step:
    """One native step; operands are indices into `Lowered.buffers`, `.matrices` and `.vectors`, -1 where absent."""

    op: str
    outputs_only: bool = False
    x: int = -1
    y: int = -1
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    matrices: list[int] = field(default_factory=list)
    vectors: list[int] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)


@dataclass
class Lowered:
    """`matrices[i]` is (weight name, this rank's rows, columns) and `vectors[i]` (weight name, elements), as [begin, end).

    Where the name is a tuple of names, the matrices lie one below the other, each with rows of zeros up to a multiple of RANK_UNIT.
    """

    steps: list[Step]
    buffers: list[Buffer]
    matrices: list[tuple[str, tuple[int, int], tuple[int, int]]]
    vectors: list[tuple[str, tuple[int, int]]]
    arena_bytes: int
    partial_width: int

    def __str__(self) -> str:
        lines = []
        for i, s in enumerate(self.steps):
            shown = {k: v for k, v in vars(s).items() if k != "op" and v not in ([], -1, False)}
            lines.append(f"{i:4d} {s.op:8s} " + " ".join(f"{k}={v}" for k, v in shown.items()))
        return "\n".join(lines) + "\n"


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
    outputs_only: bool


@dataclass
class _Head:
    """q, k or v of a layer on its way to attention."""

    buffer: int
    norm: int = -1
    eps: float = 0.0
    table: str = ""


class _Lowering:
    def __init__(self, program: Program, mesh: Mesh, formats, block_columns, max_tokens: int):
        self.program, self.mesh, self.max_tokens = program, mesh, max_tokens
        self.formats, self.block_columns = formats, block_columns
        self.steps: list[Step] = []
        self.buffers: list[Buffer] = []
        self.matrices: dict[tuple, int] = {}
        self.vectors: dict[tuple, int] = {}
        self.values: dict[str, object] = {}  # program value -> buffer index or one of the pending forms
        self.slots = 0
        self.readers: dict[str, list[Instr]] = {}
        for instr in program.instrs:
            for v in instr.inputs:
                self.readers.setdefault(v.name, []).append(instr)

    def run(self) -> Lowered:
        for instr in self.program.instrs:
            getattr(self, instr.op)(instr)
        arena_bytes = self._place()
        widths = [b.width for b in self.buffers if b.kind == "slot"]
        return Lowered(self.steps, self.buffers, list(self.matrices), list(self.vectors), arena_bytes, max(widths, default=1))

    # Operands

    def _buffer(self, kind: str, width: int, **where) -> int:
        self.buffers.append(Buffer(kind, width, **where))
        return len(self.buffers) - 1

    def _output(self, value: Value) -> int:
        """The buffer that a linear or embed writes: an exchange slot where the value is partial."""
        width = value.dims[-1].local(self.mesh)
        if value.partial:
            self.slots += 1
            return self._buffer("slot", width, place=(self.slots - 1) % SLOTS)
        return self._buffer("arena", width)

    def _matrix(self, w: Weight) -> int:
        (rows, columns) = [tuple(edge * d.width for edge in d.share(self.mesh)) for d in w.dims]
        return self.matrices.setdefault((w.name, rows, columns), len(self.matrices))

    def _vector(self, w: Weight | None) -> int:
        if w is None:
            return -1
        share = tuple(edge * w.dims[0].width for edge in w.dims[0].share(self.mesh))
        return self.vectors.setdefault((w.name, share), len(self.vectors))

    # Instructions, by op name

    def embed(self, i: Instr) -> None:
        # Only one rank's part of a row is not zero, so the scale that follows the sum may as well precede it.
        reader = self._reader(i.outputs[0])
        if reader.op == "all_reduce":
            reader = self._reader(reader.outputs[0])
        factor = reader.attrs["factor"] if reader.op == "scale" else 1.0
        out = self._output(i.outputs[0])
        table = i.weights[0]
        first = table.dims[0].share(self.mesh)[0]
        self.steps.append(Step("embed", outputs=[out], matrices=[self._matrix(table)], ints=[first], floats=[factor]))
        self.values[i.outputs[0].name] = out

    def all_reduce(self, i: Instr) -> None:
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    all_gather = all_reduce  # logits are written where rank 0 reads them

    def scale(self, i: Instr) -> None:
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def soft_cap(self, i: Instr) -> None:
        self.steps[-1].floats[1] = i.attrs["cap"]
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def take(self, i: Instr) -> None:
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name], "take"

    def rms_norm(self, i: Instr) -> None:
        source, norm = self.values[i.inputs[0].name], self._vector(i.weights[0])
        eps, reader = i.attrs["eps"], self._reader(i.outputs[0])
        outputs_only = isinstance(source, tuple)
        if outputs_only:
            source = source[0]
        if reader.op == "rope":
            result = _Head(source, norm, eps)
        elif reader.op == "add":
            result = _Residual(-1, source, norm, eps)
        elif reader.op == "linear":
            residual = source if isinstance(source, _Residual) else _Residual(-1, source, stored=self._stored(source))
            result = _Normed(residual, norm, eps, outputs_only)
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
        matrices = i.weights[: len(i.weights) // 2]
        source = self.values[i.inputs[0].name]
        begin, end = matrices[0].dims[1].share(self.mesh)
        width = matrices[0].dims[1].width
        columns = begin * width, end * width
        inputs = self._prepare(source, [w.name for w in matrices], columns)
        reader = self._reader(i.outputs[0])
        gated = reader is not None and reader.op == "gated"
        final = reader is None or reader.op in ("soft_cap", "all_gather")
        if final:
            first = matrices[0].dims[0].share(self.mesh)[0]
            outputs = [self._buffer("logits", matrices[0].dims[0].local(self.mesh), place=first)]
        else:
            outputs = [self._output(v) for v in i.outputs]
        in_dim = matrices[0].dims[1]
        adds_bias = in_dim.axis is None or self.mesh.index(in_dim.axis) == 0
        vectors = [self._vector(b) if adds_bias else -1 for b in i.weights[len(matrices) :]]
        ints = [1, GATES[reader.attrs["function"]]] if gated else [0, 0]
        self.steps.append(
            Step("linear", final, inputs=inputs, outputs=outputs, matrices=[self._matrix(w) for w in matrices], vectors=vectors, ints=ints, floats=[0.0, 0.0])
        )
        self.values.update((v.name, out) for v, out in zip(i.outputs, outputs))

    def _prepare(self, source, names: list[str], columns: tuple[int, int]) -> list[int]:
        """Emits the prepare of a linear's input; returns each matrix's activation buffer."""
        step = Step("prepare", outputs=[-1, -1, -1, -1], vectors=[-1, -1], floats=[0.0])
        if isinstance(source, _Normed):
            r = source.residual
            step.outputs_only = source.outputs_only
            step.vectors = [r.post_norm, source.norm]
            step.floats = [source.eps]
            if r.stored >= 0:  # written by an earlier prepare, or a whole value to begin with
                step.y, step.vectors[0] = r.stored, -1
            else:
                step.x, step.y = r.x, r.y
                if not source.outputs_only:
                    r.stored = step.outputs[0] = self._buffer("arena", self.buffers[r.y].width)
        else:
            step.y = source
        self.steps.append(step)
        return [self._activations(step, name, columns) for name in names]

    def _activations(self, prepare: Step, name: str, columns: tuple[int, int]) -> int:
        """The buffer in which `prepare` leaves its columns as matrix `name` reads them."""
        block = self.block_columns(name)
        begin, end = columns[0] // block * block, -(-columns[1] // block) * block
        width, lead, fmt = (end - begin if columns[1] > columns[0] else 0), columns[0] - begin, self.formats(name)
        if prepare.outputs[1 + fmt] < 0:
            prepare.outputs[1 + fmt] = self._buffer("activations", width, format=fmt, lead=lead)
        prepared = self.buffers[prepare.outputs[1 + fmt]]
        assert (prepared.width, prepared.lead) == (width, lead), "matrices that read one input have the same columns"
        return prepare.outputs[1 + fmt]

    def low_rank(self, i: Instr) -> None:
        """All A beside the matrices that they add to, in their step; then their results, prepared, times each B, into the same values."""
        prepare, base = self.steps[-2:]
        if base.op != "linear" or prepare.op != "prepare":
            raise LayoutError(f"cannot lower a low_rank that does not follow its linear: {i}")
        count = len(i.outputs)
        a, b = i.weights[:count], i.weights[count:]
        begin, end = a[0].dims[1].share(self.mesh)
        columns = begin * a[0].dims[1].width, end * a[0].dims[1].width
        rows = sum(-(-w.dims[0].size // RANK_UNIT) * RANK_UNIT for w in a)
        low = self._buffer("arena", rows)
        outputs = list(base.outputs)
        gates = [r.attrs["function"] for v in i.outputs if (r := self._reader(v)) is not None and r.op == "gated"]
        base.inputs.append(self._activations(prepare, a[0].name, columns))
        base.outputs.append(low)
        base.matrices.append(self.matrices.setdefault((tuple(w.name for w in a), (0, rows), columns), len(self.matrices)))
        base.vectors.append(-1)
        base.ints = [0, 0, 1]
        second = Step("prepare", outputs=[-1, -1, -1, -1], y=low, vectors=[-1, -1], floats=[0.0])
        self.steps.append(second)
        inputs, matrices = [self._activations(second, b[0].name, (0, rows))], [-1] * len(outputs)
        for value, w in zip(i.inputs[1:], b):
            matrices[outputs.index(self.values[value.name])] = self._matrix(w)
        self.steps.append(Step("low_rank", inputs=inputs, outputs=outputs, matrices=matrices, ints=[1, GATES[gates[0]]] if gates else [0, 0]))
        self.values.update((v.name, self.values[old.name]) for old, v in zip(i.inputs[1:], i.outputs))

    def gated(self, i: Instr) -> None:
        self.values[i.outputs[0].name] = self.values[i.inputs[0].name]

    def rope(self, i: Instr) -> None:
        source = self.values[i.inputs[0].name]
        head = source if isinstance(source, _Head) else _Head(source)
        self.values[i.outputs[0].name] = _Head(head.buffer, head.norm, head.eps, i.attrs["table"])

    def attend(self, i: Instr) -> None:
        q, k, v = (self.values[value.name] for value in i.inputs)
        out = self._buffer("arena", i.outputs[0].dims[-1].local(self.mesh))
        a = i.attrs
        self.steps.append(
            Step(
                "attend",
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
        """Gives arena buffers and activations their offsets, first fit over their lifetimes; returns the arena's bytes.

        A lifetime is counted in phases, the stretches between barriers: a small batch's prepare has no barrier of its own,
        so it shares its phase with the linear that follows, and nothing written in a phase may lie on what is read in it.
        """
        first, last = {}, {}
        phase = 0
        for step in self.steps:
            used = [step.x, step.y, *step.inputs, *step.outputs]
            for b in (b for b in used if b >= 0 and self.buffers[b].kind in ("arena", "activations")):
                first.setdefault(b, phase)
                last[b] = phase
            phase += step.op != "prepare"
        placed: list[tuple[int, int, int]] = []  # (offset, end, buffer)
        total = 0
        for b in sorted(first, key=lambda b: -self._bytes(self.buffers[b])):
            offset = 0
            for begin, end, other in sorted(placed):
                if first[b] <= last[other] and first[other] <= last[b] and offset + self._bytes(self.buffers[b]) > begin:
                    offset = max(offset, end)
            placed.append((offset, offset + self._bytes(self.buffers[b]), b))
            total = max(total, placed[-1][1])
            old = self.buffers[b]
            self.buffers[b] = Buffer(old.kind, old.width, offset, old.format, old.lead)
        return total

    def _bytes(self, buffer: Buffer) -> int:
        if buffer.kind == "arena":
            row = 4 * buffer.width
        else:
            row = native.check(native.lib.ckdist_activation_bytes(buffer.format, buffer.width))
        return -(-row * self.max_tokens // ROW_ALIGN) * ROW_ALIGN


def lower(program: Program, mesh: Mesh, formats, block_columns, max_tokens: int) -> Lowered:
    """The steps of this rank.

    `formats(weight name)` is the activation format (0 f32, 1 bf16, 2 q8) that its kernel reads, `block_columns(weight name)` the
    columns of one of its blocks. Raises LayoutError for a program that the replay has no step for.
    """
    return _Lowering(program, mesh, formats, block_columns, max_tokens).run()

"""Lowering of training: a loss and what `backward` made of it become the two lists of steps that the executor walks.

An instruction is one step, which its op's `lower` emits, but for these: gradients of weights are added to their place
in the arena of gradients, so what would add two of them is none; an add behind a product that nothing else reads is
part of its step; the loss and its gradient are one step, so that logits are computed once; an all_reduce of gradients
is begun for whole stretches of the arena as soon as all of it is complete. An instruction that has no step is an error
here.

Where a model's layers are divided over stages a rank has one or more chunks of them, and other batches run between the
two passes of one. What a backward pass reads of the forward pass is *kept*: it lies beside the arena, once for each
batch that waits.

A value is an *operand* where it can be: its rows stand as products read them (in bfloat16 where they multiply in it),
so that nothing is converted on the way into one. What is added up over the layers, and what a loss is made of, stays in
floats. Gradients that one product reads lie side by side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckdist.errors import LayoutError
from ckdist.mesh import Mesh
from ckdist.program.arena import first_fit
from ckdist.program.lowered_training import (
    ALIGNMENT,
    ChunkPrograms,
    LoweredChunk,
    LoweredTraining,
    Parameter,
    PlacedValue,
)
from ckdist.program.ops import OPS
from ckdist.program.program import Instr, Program, Value, Weight
from ckdist.program.step import ABSENT, GradientIndex, PackIndex, ParameterIndex, Step, ValueIndex

ALIGN = 64
TILE = 16  # columns that products read at once
UNPLACED = -1  # a value of a row, before the step that makes it
BUCKET_BYTES = 1 << 20  # a shorter stretch of gradients waits for its neighbours
# ops of which every value is in floats, and results that no product reads as they are
FLOAT_RESULTS = {"embed", "scale", "add", "cross_entropy_grad", "low_rank", "recv", "tally", "balance_loss_grad"}
NO_OPERANDS = {"attend_packed": (1,), "route": (0, 1), "grouped_experts": (0,), "grouped_experts_grad": (0, 1)}
FLOAT_READERS = {
    "scale",
    "add",
    "embed_grad",
    "all_reduce",
    "route",
    "route_grad",
    "tally",
    "tally_grad",
    "balance_loss_grad",
    "send",
}  # low_rank reads what it adds to
PRODUCTS = (
    "weight_grad",
    "cross_entropy",
    "grouped_experts_grad",
    "latent_keys_weight_grad",
)  # kinds of steps that can overwrite a gradient


@dataclass
class Names:
    """What one program's values are, while it is lowered."""

    readers: dict[Value, list[Instr]] = field(default_factory=dict)
    makers: dict[Value, Instr] = field(default_factory=dict)
    of_weight: dict[Value, int] = field(default_factory=dict)  # value -> the parameter of whose gradient it is a part
    partial: dict[int, tuple[str, ...]] = field(
        default_factory=dict
    )  # the axes that each of these gradients is summed over
    at: dict[Value, ValueIndex] = field(default_factory=dict)
    residuals: dict[Value, Value] = field(default_factory=dict)  # a product's output -> what its step adds
    beside: dict[Value, tuple[list[int], int]] = field(default_factory=dict)  # the row of a value, and its place there
    operands: dict[Value, ValueIndex] = field(default_factory=dict)  # made of values in floats


class TrainingLowering:
    """What the ops' `lower` ask, and where they leave their steps."""

    def __init__(
        self, wrt: Sequence[Weight], weights: Sequence[Weight], mesh: Mesh, operand_bytes: int, stored: frozenset[str]
    ):
        self.mesh, self.operand_bytes = mesh, operand_bytes
        self.chunk = 0  # whose program is lowered
        self.packs: dict[tuple[bool, tuple[int, ...]], PackIndex] = {}
        self.placed: list[PlacedValue] = []
        self.rows: list[list[int]] = []  # values that lie side by side; most are alone
        self.parameters: dict[Weight, ParameterIndex] = {}
        self.places: list[Parameter] = []
        offset = 0
        for weight in dict.fromkeys((*wrt, *weights)):
            *rows, columns = (d.local(mesh) for d in weight.dims)
            self.parameters[weight] = ParameterIndex(len(self.places))
            place = Parameter(
                weight.name, offset, math.prod(rows), columns, weight.name in stored, math.prod(rows[:-1])
            )
            self.places.append(place)
            offset = -(-self.places[-1].end // ALIGNMENT) * ALIGNMENT
        self.trained = len(dict.fromkeys(wrt))
        self.emitted: list[Step] = []
        self.begun: set[int] = set()  # parameters whose gradients a step has added to
        self.names = Names()

    def steps(self, program: Program, wrt: Sequence[Weight] = ()) -> list[Step]:
        """The steps of one program, which gives the gradients by `wrt`. Values are numbered on from those of programs
        before it.
        """
        self.emitted, self.begun, names = [], set(), Names()
        self.names = names
        for instr in program.instrs:
            names.makers.update(dict.fromkeys(instr.outputs, instr))
            for v in instr.inputs:
                names.readers.setdefault(v, []).append(instr)
        for weight, output in zip(wrt, program.outputs[1:], strict=False):
            self._claim(output, self.parameters[weight])
        self._fuse_adds(program)
        self._lay_beside(program)
        for instr in program.instrs:
            lower = OPS[instr.op].lower.get("training")
            if lower is None:
                raise LayoutError(f"training has no native step for {instr.op}: {instr}")
            lower(self, instr)
        return self.emitted

    def _claim(self, value: Value, parameter: int, axes: tuple[str, ...] = ()) -> None:
        """Says that a value, and what is added up to it, are parts of a parameter's gradient, summed over `axes`.

        LayoutError where its parts are to be summed over different axes.
        """
        instr = self.names.makers[value]
        self.names.of_weight[value] = parameter
        if instr.op == "all_reduce":
            axes = (instr.attrs["axis"], *axes)
        if instr.op in ("add", "all_reduce"):
            for part in instr.inputs:
                self._claim(part, parameter, axes)
        elif self.names.partial.setdefault(parameter, axes) != axes:
            raise LayoutError(f"parts of the gradient of {self.places[parameter].name} are partial over different axes")

    def _fuse_adds(self, program: Program) -> None:
        """Pattern `product_with_residual`: add(a, b) where b is made by a product or a norm's gradient that nothing
        else reads, and a is there before it: that step adds a. Either operand may be b.
        """
        names = self.names
        made_at = {v: index for index, instr in enumerate(program.instrs) for v in instr.outputs}
        for v in program.inputs:
            made_at[v] = -1
        for instr in program.instrs:
            if instr.op != "add" or instr.outputs[0] in names.of_weight:
                continue
            a, b = instr.inputs
            for own, other in ((b, a), (a, b)):
                maker = names.makers.get(own)
                if a == b or maker is None or names.readers[own] != [instr] or own in names.residuals:
                    continue
                fits = maker.op == "rms_norm_grad" or (maker.op == "linear" and len(maker.outputs) == 1)
                if fits and made_at[other] < made_at[own]:
                    names.residuals[own] = other
                    made_at[instr.outputs[0]] = made_at[own]
                    break

    def _lay_beside(self, program: Program) -> None:
        """Finds the gradients that one product reads, which then lie side by side."""
        names = self.names
        for instr in program.instrs:
            together = instr.op == "linear_grad" and len(instr.inputs) > 1
            if together and all(v not in names.beside and self._is_operand(v, names.makers[v]) for v in instr.inputs):
                self.rows.append([UNPLACED] * len(instr.inputs))
                names.beside |= {v: (self.rows[-1], at) for at, v in enumerate(instr.inputs)}

    # What the ops' `lower` ask

    def emit(self, kind: str, **fields: Any) -> None:
        """Appends a step."""
        self.emitted.append(Step(kind, fields))

    def value(self, value: Value) -> ValueIndex:
        """A value as it is."""
        return self.names.at[value]

    def width(self, index: ValueIndex) -> int:
        """Elements of a row."""
        return self.placed[index].width

    def stands_for(self, value: Value, source: Value) -> None:
        """Says that `value` is read where `source` lies."""
        self.names.at[value] = self.names.at[source]

    def residual(self, output: Value) -> ValueIndex:
        """What the step that makes `output` adds to it, or ABSENT."""
        other = self.names.residuals.get(output)
        return ValueIndex(ABSENT) if other is None else self.names.at[other]

    def is_for_loss_alone(self, value: Value) -> bool:
        """Whether nothing but the load-balancing loss reads a value, and not its gradient."""
        return all(reader.op == "balance_loss" for reader in self.names.readers.get(value, ()))

    def is_fused(self, instr: Instr) -> bool:
        """Whether an add is part of the step that makes one of its operands, where its result then is."""
        for own, other in (instr.inputs, instr.inputs[::-1]):
            if self.names.residuals.get(own) == other:
                self.names.at[instr.outputs[0]] = self.names.at[own]
                return True
        return False

    def operand(self, value: Value) -> ValueIndex:
        """The value as products read it; where it stands otherwise a step converts it first, once."""
        if value not in self.names.operands:
            self.names.operands[value] = self.converted(self.names.at[value])
        return self.names.operands[value]

    def converted(self, index: ValueIndex) -> ValueIndex:
        """The same value where it is an operand, else a new one that a step converts."""
        if self.placed[index].operand:
            return index
        made = self.like(index, True)
        self.emit("convert", x=index, out=made)
        return made

    def output(self, value: Value) -> ValueIndex:
        """The place of a value that the next step makes, in its row."""
        names, width, rows = self.names, value.dims[-1].local(self.mesh), value.dims[0].width
        if len(value.dims) == 1:
            names.at[value] = self.alone(width, False, 0)
        elif value in names.beside:
            row, at = names.beside[value]
            names.at[value] = ValueIndex(self._place(width, True))
            row[at] = names.at[value]
        else:
            head = value.dims[-1].width  # products read whole tiles of the last one too
            room = width - head + -(-head // TILE) * TILE if head > 1 else 0
            names.at[value] = self.alone(width, self._is_operand(value, names.makers[value]), rows, room)
        return names.at[value]

    def side_by_side(self, values: Sequence[Value]) -> list[ValueIndex]:
        """Operands that lie side by side; those that do not are copied first."""
        row = [self.names.at[v] for v in values]
        if len(row) == 1:
            return [self.operand(values[0])]
        if [int(v) for v in row] not in self.rows:  # floats, or beside others elsewhere
            sources, row = row, [ValueIndex(self._place(self.placed[index].width, True)) for index in row]
            self.rows.append([int(v) for v in row])
            for source, made in zip(sources, row, strict=True):
                self.emit("convert", x=source, out=made)
        return row

    def alone(self, width: int, operand: bool, rows: int = 1, room: int = 0) -> ValueIndex:
        """A new value in a row of its own, of which a token has so many, with room for as many elements or more. 0: the
        batch has one.
        """
        self.rows.append([self._place(width, operand, rows, room)])
        return ValueIndex(self.rows[-1][0])

    def like(self, index: ValueIndex, operand: bool) -> ValueIndex:
        """A new value of another's size."""
        placed = self.placed[index]
        return self.alone(placed.width, operand, placed.rows, placed.room)

    def parameter(self, weight: Weight | None) -> ParameterIndex:
        """A weight's index; ABSENT where there is none."""
        return ParameterIndex(ABSENT) if weight is None else self.parameters[weight]

    def pack(self, transposed: bool, *weights: Weight) -> PackIndex:
        """The pack in which these weights lie side by side."""
        key = transposed, tuple(int(self.parameters[w]) for w in weights)
        return self.packs.setdefault(key, PackIndex(len(self.packs)))

    def gradient(self, value: Value) -> GradientIndex:
        """The parameter to whose gradient a step adds `value`."""
        return GradientIndex(self.names.of_weight[value])

    def message(self, sender: int, receiver: int) -> tuple[int, int]:
        """The stage that the chunk which is lowered exchanges rows with, and the tag of such rows: those of activations
        and of gradients for one chunk differ.
        """
        other = sender + receiver - self.chunk
        return other % self.mesh.size("pp"), 2 * receiver + (receiver < sender)

    def is_fresh(self, value: Value) -> bool:
        """Whether the next step is the first that adds to the gradient of which `value` is a part."""
        parameter = self.names.of_weight[value]
        fresh = parameter not in self.begun
        self.begun.add(parameter)
        return fresh

    def _place(self, width: int, operand: bool, rows: int = 1, room: int = 0) -> int:
        """A new value of `width` elements a row; returns its index."""
        self.placed.append(PlacedValue(width, -(-max(width, room) // TILE) * TILE, operand, rows))
        return len(self.placed) - 1

    def _is_operand(self, value: Value, made_by: Instr) -> bool:
        """Whether a value's rows stand as products read them."""
        if any(value is made_by.outputs[place] for place in NO_OPERANDS.get(made_by.op, ())):
            return False
        floats = made_by.op in FLOAT_RESULTS or any(
            r.op in FLOAT_READERS or (r.op == "low_rank" and value in r.inputs[1:])
            for r in self.names.readers.get(value, ())
        )
        return self.operand_bytes == 4 or not floats

    # Gradients, as soon as they are complete

    def reduced(self, steps: list[Step]) -> list[Step]:
        """`steps` with reduces between them; every gradient is in one, and they are the same on every rank of the
        replicas. A stretch has gradients that are summed over the same axes.
        """
        tensor = {p for p, axes in self.names.partial.items() if "tp" in axes}
        last = {p: index for index, step in enumerate(steps) for p in step.operands(GradientIndex)}
        waiting: set[int] = set()
        result: list[Step] = []
        for index, step in enumerate(steps):
            result.append(step)
            waiting |= {int(p) for p in step.operands(GradientIndex) if last[p] == index}
            for stretch in [*_stretches(waiting - tensor), *_stretches(waiting & tensor)]:
                begin, end = self.places[stretch[0]].offset, self.places[stretch[-1]].end
                if 4 * (end - begin) >= BUCKET_BYTES or index == len(steps) - 1:
                    fields = {"begin": begin, "end": end, "tensor": stretch[0] in tensor}
                    result.append(Step("reduce_gradients", fields))
                    waiting -= set(stretch)
        return result

    def cleared(self, steps: list[Step]) -> frozenset[int]:
        """The parameters whose gradients the first step that has them adds to, and does not overwrite."""
        first: dict[int, str] = {}
        for step in steps:
            for p in step.operands(GradientIndex):
                first.setdefault(int(p), step.kind)
        return frozenset(p for p, kind in first.items() if kind not in PRODUCTS)

    # Memory

    def place(self, lists: Sequence[list[Step]], max_tokens: int) -> int:
        """Gives every value its place that is not kept: a row lives over the steps that use a value of it. The bytes
        of the arena.
        """
        row_of = self._row_of()
        steps = [step for steps in lists for step in steps]
        uses = [(time, row_of[int(v)]) for time, step in enumerate(steps) for v in step.operands(ValueIndex)]
        uses = [(time, row) for time, row in uses if not self._head(row).kept]
        offsets, total = first_fit(uses, lambda row: self._row_bytes(row, max_tokens))
        for row, begin in offsets.items():
            self._put(row, begin)
        return total

    def keep(self, forward: list[Step], backward: list[Step], max_tokens: int) -> int:
        """Gives the values that both passes use their places in what is kept of a batch; its bytes."""
        row_of, total = self._row_of(), 0
        first, second = (
            {row_of[int(v)] for s in steps for v in s.operands(ValueIndex)} for steps in (forward, backward)
        )
        for row in sorted(first & second):
            self._put(row, total)
            for v in self.rows[row]:
                self.placed[v].kept = True
            total += self._row_bytes(row, max_tokens)
        return total

    def stride_rows(self) -> None:
        """Says how far apart the rows of values are, once all are there."""
        for row in self.rows:
            values = [self.placed[v] for v in row]
            values[-1].room += sum(v.room for v in values) % 32  # products read whole vectors of two bfloat16
            used = sum(v.room * self._element_bytes(v) for v in values)
            for v in values:
                # no multiple of a large power of two, or rows share sets of the caches
                v.stride = (-(-used // ALIGN) | 1) * ALIGN

    def _row_of(self) -> dict[int, int]:
        """Which row a value is in."""
        return {v: r for r, row in enumerate(self.rows) for v in row}

    def _head(self, row: int) -> PlacedValue:
        """The first value of a row."""
        return self.placed[self.rows[row][0]]

    def _row_bytes(self, row: int, max_tokens: int) -> int:
        """Of a batch."""
        head = self._head(row)
        return (max_tokens * head.rows or 1) * head.stride

    def _element_bytes(self, value: PlacedValue) -> int:
        """Of an element of a value."""
        return self.operand_bytes if value.operand else 4

    def _put(self, row: int, offset: int) -> None:
        """Places the values of a row side by side."""
        for v in self.rows[row]:
            self.placed[v].offset = offset
            offset += self.placed[v].room * self._element_bytes(self.placed[v])


def _stretches(numbers: set[int]) -> list[list[int]]:
    """Runs of consecutive numbers, the highest first: gradients are complete from the end on."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return runs[::-1]


def lower_training(
    chunks: Sequence[ChunkPrograms],
    mesh: Mesh,
    max_tokens: int,
    operand_bytes: int,
    stored: frozenset[str] = frozenset(),
) -> LoweredTraining:
    """The steps of a rank for batches of up to `max_tokens` tokens, of the chunks that it has. Their trained weights
    are the first parameters, in the order of the chunks.

    `operand_bytes`: of an element of an operand, 2 or 4. `stored`: names of frozen matrices that are multiplied as
    their file has them.

    Raises LayoutError for an instruction that the executor has no step for.
    """
    trained, weights = ([w for c in chunks for w in some(c)] for some in (lambda c: c.wrt, lambda c: c.forward.weights))
    lowering = TrainingLowering(trained, weights, mesh, operand_bytes, stored)
    passes = [_lower_chunk(lowering, chunk) for chunk in chunks]
    lowering.stride_rows()
    kept = [
        0 if chunk.has_loss else lowering.keep(forward, backward, max_tokens)
        for chunk, (forward, backward, _) in zip(chunks, passes, strict=True)
    ]
    lists = [steps for forward, backward, _ in passes for steps in (backward, forward)]
    arena_bytes = lowering.place(lists, max_tokens)
    trained_floats = -(-lowering.places[lowering.trained - 1].end // ALIGNMENT) * ALIGNMENT
    lowered = [LoweredChunk(*lists, size) for lists, size in zip(passes, kept, strict=True)]
    packs = list(lowering.packs)
    return LoweredTraining(lowered, lowering.placed, lowering.places, packs, arena_bytes, trained_floats)


def _lower_chunk(lowering: TrainingLowering, chunk: ChunkPrograms) -> tuple[list[Step], list[Step], frozenset[int]]:
    """The steps of the forward pass, those of the backward pass, and the parameters whose gradients that clears."""
    lowering.chunk = chunk.number
    steps = lowering.steps(chunk.gradients, chunk.wrt)
    sends = 0 if chunk.has_loss else 1 + next(i for i, step in enumerate(steps) if step.kind == "send_rows")
    backward = lowering.reduced(steps[sends:])
    forward = lowering.steps(chunk.forward) if chunk.has_loss else steps[:sends]
    return forward, backward, lowering.cleared(backward)

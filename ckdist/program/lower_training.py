"""Lowering of training: turns a loss and its backward pass into two lists of steps that the executor runs.

Each op's `lower` emits one step per instruction, with these exceptions:

- Steps add the gradients of weights to the gradient arena, so an add of two such gradients needs no step.
- An add after a product that nothing else reads is part of the product's step.
- The loss and its gradient are one step, so that logits are computed once.
- An all_reduce of gradients runs on a contiguous range of the arena, as soon as all gradients in it are complete.

An instruction without a step is an error here.

If the layers of a model are divided over stages, a rank has one or more chunks of layers. Other batches run between
the forward and the backward pass of a chunk. The values that the backward pass reads from the forward pass are *kept*
outside the arena, once for each batch in flight.

A value is an *operand* if possible: its rows are stored in the form that products read (bfloat16 if they multiply in
it), so that no product converts them. Sums over the layers and inputs of a loss stay in float32. Gradients that one
product reads together lie side by side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckdist.errors import LayoutError
from ckdist.mesh import Mesh
from ckdist.program.arena_offsets import first_fit
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
UNPLACED = -1  # index of a value in a row before the step that makes it is emitted
BUCKET_BYTES = 1 << 20  # a shorter range of gradients waits for its neighbours
# ops whose results are all float32; then, by op, the indices of results that are float32
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
}  # low_rank reads the values that it adds to, but x as an operand
PRODUCTS = (
    "weight_grad",
    "cross_entropy",
    "grouped_experts_grad",
    "latent_keys_weight_grad",
)  # kinds of steps that can overwrite a gradient


@dataclass
class Names:
    """Lookup tables for the values of the program that is being lowered."""

    readers: dict[Value, list[Instr]] = field(default_factory=dict)
    makers: dict[Value, Instr] = field(default_factory=dict)
    of_weight: dict[Value, int] = field(default_factory=dict)  # summand of a weight's gradient -> its parameter
    partial: dict[int, tuple[str, ...]] = field(default_factory=dict)  # parameter -> axes its gradient is summed over
    at: dict[Value, ValueIndex] = field(default_factory=dict)
    residuals: dict[Value, Value] = field(default_factory=dict)  # a product's output -> the value that its step adds
    beside: dict[Value, tuple[list[int], int]] = field(default_factory=dict)  # value -> (its row, its index there)
    operands: dict[Value, ValueIndex] = field(default_factory=dict)  # value -> its copy in the form of an operand


class TrainingLowering:
    """The state of one lowering: each op's `lower` looks up operands here and emits its steps here."""

    def __init__(
        self, wrt: Sequence[Weight], weights: Sequence[Weight], mesh: Mesh, operand_bytes: int, stored: frozenset[str]
    ):
        self.mesh, self.operand_bytes = mesh, operand_bytes
        self.chunk = 0  # number of the chunk whose program is being lowered
        self.packs: dict[tuple[bool, tuple[int, ...]], PackIndex] = {}
        self.placed: list[PlacedValue] = []
        self.rows: list[list[int]] = []  # values that lie side by side; most rows have one value
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
        self.begun: set[int] = set()  # parameters whose gradients an earlier step writes
        self.names = Names()

    def steps(self, program: Program, wrt: Sequence[Weight] = ()) -> list[Step]:
        """The steps of one program, whose outputs after the first are the gradients by `wrt`.

        Value indices continue from those of the programs lowered before.
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
        """Marks a value and its summands as parts of a parameter's gradient, which is summed over `axes`.

        Raises LayoutError if parts of one gradient are summed over different axes.
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
        """Fuses add(a, b) into the step that makes b, a product or the gradient of a norm.

        Only if nothing else reads b, and a is made before b. Either operand may be b.
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
        """Assigns one row to the gradients that one product reads together."""
        names = self.names
        for instr in program.instrs:
            together = instr.op == "linear_grad" and len(instr.inputs) > 1
            if together and all(v not in names.beside and self._is_operand(v, names.makers[v]) for v in instr.inputs):
                self.rows.append([UNPLACED] * len(instr.inputs))
                names.beside |= {v: (self.rows[-1], at) for at, v in enumerate(instr.inputs)}

    # Called by the ops' `lower`

    def emit(self, kind: str, **fields: Any) -> None:
        """Appends a step."""
        self.emitted.append(Step(kind, fields))

    def value(self, value: Value) -> ValueIndex:
        """The index of a value, without a conversion."""
        return self.names.at[value]

    def width(self, index: ValueIndex) -> int:
        """Elements in a row of a value."""
        return self.placed[index].width

    def stands_for(self, value: Value, source: Value) -> None:
        """Makes `value` an alias of `source`."""
        self.names.at[value] = self.names.at[source]

    def residual(self, output: Value) -> ValueIndex:
        """The value that the step of `output` adds to it, or ABSENT."""
        other = self.names.residuals.get(output)
        return ValueIndex(ABSENT) if other is None else self.names.at[other]

    def is_for_loss_alone(self, value: Value) -> bool:
        """Whether only the load-balancing loss reads a value. Its gradient counts as another reader."""
        return all(reader.op == "balance_loss" for reader in self.names.readers.get(value, ()))

    def is_fused(self, instr: Instr) -> bool:
        """Whether the step of one operand computes the add. The result is then an alias of that operand."""
        for own, other in (instr.inputs, instr.inputs[::-1]):
            if self.names.residuals.get(own) == other:
                self.names.at[instr.outputs[0]] = self.names.at[own]
                return True
        return False

    def operand(self, value: Value) -> ValueIndex:
        """The value in the form that products read. The first call emits a conversion if it has another form."""
        if value not in self.names.operands:
            self.names.operands[value] = self.converted(self.names.at[value])
        return self.names.operands[value]

    def converted(self, index: ValueIndex) -> ValueIndex:
        """`index` if that is an operand, else a new value: its conversion by a step."""
        if self.placed[index].operand:
            return index
        made = self.like(index, True)
        self.emit("convert", x=index, out=made)
        return made

    def output(self, value: Value) -> ValueIndex:
        """Adds the value that the next step makes, and returns its index."""
        names, width, rows = self.names, value.dims[-1].local(self.mesh), value.dims[0].width
        if len(value.dims) == 1:
            names.at[value] = self.alone(width, False, 0)
        elif value in names.beside:
            row, at = names.beside[value]
            names.at[value] = ValueIndex(self._place(width, True))
            row[at] = names.at[value]
        else:
            head = value.dims[-1].width  # products read whole tiles, also of the last head
            room = width - head + -(-head // TILE) * TILE if head > 1 else 0
            names.at[value] = self.alone(width, self._is_operand(value, names.makers[value]), rows, room)
        return names.at[value]

    def side_by_side(self, values: Sequence[Value]) -> list[ValueIndex]:
        """The operands of `values`, side by side. If they are not, steps copy them to a new row first."""
        row = [self.names.at[v] for v in values]
        if len(row) == 1:
            return [self.operand(values[0])]
        if [int(v) for v in row] not in self.rows:  # float32 values, or values in other rows
            sources, row = row, [ValueIndex(self._place(self.placed[index].width, True)) for index in row]
            self.rows.append([int(v) for v in row])
            for source, made in zip(sources, row, strict=True):
                self.emit("convert", x=source, out=made)
        return row

    def alone(self, width: int, operand: bool, rows: int = 1, room: int = 0) -> ValueIndex:
        """A new value in a row of its own, with space for max(width, room) elements.

        `rows` is the number of rows per token; 0: one row per batch.
        """
        self.rows.append([self._place(width, operand, rows, room)])
        return ValueIndex(self.rows[-1][0])

    def like(self, index: ValueIndex, operand: bool) -> ValueIndex:
        """A new value of the same size as `index`."""
        placed = self.placed[index]
        return self.alone(placed.width, operand, placed.rows, placed.room)

    def parameter(self, weight: Weight | None) -> ParameterIndex:
        """The parameter index of a weight; ABSENT if it is None."""
        return ParameterIndex(ABSENT) if weight is None else self.parameters[weight]

    def pack(self, transposed: bool, *weights: Weight) -> PackIndex:
        """The pack that has these weights side by side."""
        key = transposed, tuple(int(self.parameters[w]) for w in weights)
        return self.packs.setdefault(key, PackIndex(len(self.packs)))

    def gradient(self, value: Value) -> GradientIndex:
        """The parameter whose gradient `value` is a part of."""
        return GradientIndex(self.names.of_weight[value])

    def message(self, sender: int, receiver: int) -> tuple[int, int]:
        """The stage that the current chunk exchanges rows with, and the tag of the message.

        Activations and gradients for one chunk have different tags.
        """
        other = sender + receiver - self.chunk
        return other % self.mesh.size("pp"), 2 * receiver + (receiver < sender)

    def is_fresh(self, value: Value) -> bool:
        """Whether the next step is the first to write the gradient that `value` is a part of."""
        parameter = self.names.of_weight[value]
        fresh = parameter not in self.begun
        self.begun.add(parameter)
        return fresh

    def _place(self, width: int, operand: bool, rows: int = 1, room: int = 0) -> int:
        """Adds a value with `width` elements in a row; returns its index."""
        self.placed.append(PlacedValue(width, -(-max(width, room) // TILE) * TILE, operand, rows))
        return len(self.placed) - 1

    def _is_operand(self, value: Value, made_by: Instr) -> bool:
        """Whether a value's rows are stored in the form that products read."""
        if any(value is made_by.outputs[place] for place in NO_OPERANDS.get(made_by.op, ())):
            return False
        floats = made_by.op in FLOAT_RESULTS or any(
            r.op in FLOAT_READERS or (r.op == "low_rank" and value in r.inputs[1:])
            for r in self.names.readers.get(value, ())
        )
        return self.operand_bytes == 4 or not floats

    # Reduction of gradients

    def reduced(self, steps: list[Step]) -> list[Step]:
        """Inserts steps that reduce ranges of gradients as soon as these are complete.

        Each gradient is in one range. All gradients of a range are summed over the same axes. The ranges are the same
        on all replicas.
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
        """The parameters whose gradients must be zeroed: their first step adds to them, it cannot overwrite them."""
        first: dict[int, str] = {}
        for step in steps:
            for p in step.operands(GradientIndex):
                first.setdefault(int(p), step.kind)
        return frozenset(p for p, kind in first.items() if kind not in PRODUCTS)

    # Memory

    def place(self, lists: Sequence[list[Step]], max_tokens: int) -> int:
        """Assigns arena offsets to all values that are not kept; returns the bytes of the arena.

        A row lives from the first to the last step that uses one of its values.
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
        """Assigns offsets in the kept memory to values that both passes use; returns its bytes for one batch."""
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
        """Sets the stride of each value. Called once all values are added."""
        for row in self.rows:
            values = [self.placed[v] for v in row]
            values[-1].room += sum(v.room for v in values) % 32  # products read whole vectors of two bfloat16
            used = sum(v.room * self._element_bytes(v) for v in values)
            for v in values:
                # an odd number of cache lines: with a large power of two, rows would share cache sets
                v.stride = (-(-used // ALIGN) | 1) * ALIGN

    def _row_of(self) -> dict[int, int]:
        """Value index -> row number."""
        return {v: r for r, row in enumerate(self.rows) for v in row}

    def _head(self, row: int) -> PlacedValue:
        return self.placed[self.rows[row][0]]

    def _row_bytes(self, row: int, max_tokens: int) -> int:
        """Bytes of a row's values for a whole batch."""
        head = self._head(row)
        return (max_tokens * head.rows or 1) * head.stride

    def _element_bytes(self, value: PlacedValue) -> int:
        return self.operand_bytes if value.operand else 4

    def _put(self, row: int, offset: int) -> None:
        for v in self.rows[row]:
            self.placed[v].offset = offset
            offset += self.placed[v].room * self._element_bytes(self.placed[v])


def _stretches(numbers: set[int]) -> list[list[int]]:
    """Runs of consecutive numbers, the highest first: the backward pass completes the last gradients first."""
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
    """Lowers the chunks of a rank. Their trained weights are the first parameters, in the order of the chunks.

    Args:
        chunks: The programs of each chunk of layers that the rank has.
        mesh: The mesh, with this rank's coordinates.
        max_tokens: Most tokens in a batch.
        operand_bytes: Bytes per element of an operand, 2 or 4.
        stored: Names of frozen matrices that are multiplied in the type of their file.

    Raises:
        LayoutError: The executor has no step for an instruction.
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
    """Returns the forward steps, the backward steps, and the parameters whose gradients the backward pass zeroes."""
    lowering.chunk = chunk.number
    steps = lowering.steps(chunk.gradients, chunk.wrt)
    sends = 0 if chunk.has_loss else 1 + next(i for i, step in enumerate(steps) if step.kind == "send_rows")
    backward = lowering.reduced(steps[sends:])
    forward = lowering.steps(chunk.forward) if chunk.has_loss else steps[:sends]
    return forward, backward, lowering.cleared(backward)

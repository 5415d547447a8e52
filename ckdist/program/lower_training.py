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
from dataclasses import dataclass, replace
from typing import Any

from ckdist.errors import LayoutError
from ckdist.mesh import Mesh
from ckdist.program.lowered import ALIGNMENT, Buffer, Lowered, Parameter, StepList
from ckdist.program.lowering import ROW_ALIGN, Lowering
from ckdist.program.program import Instr, Program, Value, Weight
from ckdist.program.step import ABSENT, GradientIndex, PackIndex, ParameterIndex, Step, ValueIndex

TILE = 16  # columns that products read at once
UNPLACED = -1  # index of a value in a row before the step that makes it is emitted
BUCKET_BYTES = 1 << 20  # a shorter range of gradients waits for its neighbours
KEPT_FLOATS = 16 << 20  # trained floats at the beginning, whose pages ZeRO does not free
# ops whose results are all float32; then, by op, the indices of results that are float32
FLOAT_RESULTS = {"embed", "scale", "add", "cross_entropy_grad", "low_rank", "recv", "tally", "balance_loss_grad"}
NO_OPERANDS = {"attend_packed": (1,), "route": (0, 1), "grouped_experts": (0,), "grouped_experts_grad": (0, 1)}
# low_rank reads the values that it adds to, but x as an operand
FLOAT_READERS = {"scale", "add", "embed_grad", "all_reduce", "route", "route_grad", "send"}
FLOAT_READERS |= {"tally", "tally_grad", "balance_loss_grad", "delta_packed", "delta_grad", "convolve", "convolve_grad"}
# kinds of steps that can overwrite a gradient
PRODUCTS = ("weight_grad", "cross_entropy", "grouped_experts_grad", "latent_keys_weight_grad")


class TrainingLowering(Lowering):
    """The lowering of a training: parameters, gradients, and values that lie side by side or are kept."""

    step_set = "training"

    def __init__(
        self,
        wrt: Sequence[Weight],
        weights: Sequence[Weight],
        mesh: Mesh,
        max_tokens: int,
        operand_bytes: int,
        stored: frozenset[str],
    ):
        super().__init__(mesh, max_tokens)
        self.operand_bytes = operand_bytes
        self.chunk = 0  # number of the chunk whose program is being lowered
        self.packs: dict[tuple[bool, tuple[int, ...]], PackIndex] = {}
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

    def begin(self, program: Program) -> None:
        """Begins the steps of a program, with empty tables of its values."""
        super().begin(program)
        self.begun: set[int] = set()  # parameters whose gradients an earlier step writes
        self.of_weight: dict[Value, int] = {}  # summand of a weight's gradient -> its parameter
        self.partial: dict[int, tuple[str, ...]] = {}  # parameter -> axes its gradient is summed over
        self.residuals: dict[Value, Value] = {}  # a product's output -> the value that its step adds
        self.beside: dict[Value, tuple[list[int], int]] = {}  # value -> (its row, its index there)
        self.operands: dict[Value, ValueIndex] = {}  # value -> its copy in the form of an operand

    def lowered(self, program: Program, wrt: Sequence[Weight] = ()) -> list[Step]:
        """The steps of one program, whose outputs after the first are the gradients by `wrt`."""
        self.begin(program)
        for weight, output in zip(wrt, program.outputs[1:], strict=False):
            self._claim(output, self.parameters[weight])
        self._fuse_adds(program)
        self._lay_beside(program)
        for instr in program.instrs:
            self.rule(instr)(self, instr)
        return self.steps

    def _claim(self, value: Value, parameter: int, axes: tuple[str, ...] = ()) -> None:
        """Marks a value and its summands as parts of a parameter's gradient, which is summed over `axes`.

        Raises LayoutError if parts of one gradient are summed over different axes.
        """
        instr = self.graph.makers[value.name]
        self.of_weight[value] = parameter
        if instr.op == "all_reduce":
            axes = (instr.attrs["axis"], *axes)
        if instr.op in ("add", "all_reduce"):
            for part in instr.inputs:
                self._claim(part, parameter, axes)
        elif self.partial.setdefault(parameter, axes) != axes:
            raise LayoutError(f"parts of the gradient of {self.places[parameter].name} are partial over different axes")

    def _fuse_adds(self, program: Program) -> None:
        """Fuses add(a, b) into the step that makes b, a product or the gradient of a norm.

        Only if nothing else reads b, and a is made before b. Either operand may be b.
        """
        made_at = {v: index for index, instr in enumerate(program.instrs) for v in instr.outputs}
        for v in program.inputs:
            made_at[v] = -1
        for instr in program.instrs:
            if instr.op != "add" or instr.outputs[0] in self.of_weight:
                continue
            a, b = instr.inputs
            for own, other in ((b, a), (a, b)):
                maker = self.graph.makers.get(own.name)
                if a == b or maker is None or self.graph.readers(own) != [instr] or own in self.residuals:
                    continue
                fits = maker.op == "rms_norm_grad" or (maker.op == "linear" and len(maker.outputs) == 1)
                if fits and made_at[other] < made_at[own]:
                    self.residuals[own] = other
                    made_at[instr.outputs[0]] = made_at[own]
                    break

    def _lay_beside(self, program: Program) -> None:
        """Assigns one row to the gradients that one product reads together."""
        for instr in program.instrs:
            together = instr.op == "linear_grad" and len(instr.inputs) > 1
            if together and all(v not in self.beside and self._is_operand(v) for v in instr.inputs):
                self.rows.append([UNPLACED] * len(instr.inputs))
                self.beside |= {v: (self.rows[-1], at) for at, v in enumerate(instr.inputs)}

    # Called by the ops' `lower`

    def residual(self, output: Value) -> ValueIndex:
        """The value that the step of `output` adds to it, or ABSENT."""
        other = self.residuals.get(output)
        while (
            other is not None and self.source(other).name not in self.at
        ):  # an add in the step of one operand, which comes later
            first, second = self.graph.makers[other.name].inputs
            other = first if self.residuals.get(first) == second else second
        return ValueIndex(ABSENT) if other is None else self.place_of(other)

    def is_for_loss_alone(self, value: Value) -> bool:
        """True if only the load-balancing loss reads a value. Its gradient counts as another reader."""
        return all(reader.op == "balance_loss" for reader in self.graph.readers(value))

    def is_fused(self, instr: Instr) -> bool:
        """True if the step of one operand computes the add. The result is then an alias of that operand."""
        for own, other in (instr.inputs, instr.inputs[::-1]):
            if self.residuals.get(own) == other:
                self.stands_for(instr.outputs[0], own)
                return True
        return False

    def operand(self, value: Value) -> ValueIndex:
        """The value in the form that products read. The first call emits a conversion if it has another form."""
        if value not in self.operands:
            self.operands[value] = self.converted(self.place_of(value))
        return self.operands[value]

    def converted(self, index: ValueIndex) -> ValueIndex:
        """`index` if that is an operand, else a new value: its conversion by a step."""
        if self.buffers[index].is_operand:
            return index
        made = self.like(index, place="activations")
        self.emit("convert", x=index, out=made)
        return made

    def emit_rows(self, kind: str, instr: Instr, inputs: str, outputs: str = "out", /, **fields: Any) -> None:
        """Appends a step whose operands are those of `instr`, with these names."""
        names = *inputs.split(), *outputs.split()
        places = [*map(self.place_of, instr.inputs), *map(self.output, instr.outputs)]
        self.emit(kind, **dict(zip(names, places, strict=True)), **fields)

    def output(self, value: Value) -> ValueIndex:
        """Adds the value that the next step makes, and returns its index."""
        width, rows = value.dims[-1].local(self.mesh), value.dims[0].width
        if len(value.dims) == 1:
            made = self.alone(width, False, 0)
        elif value in self.beside:
            row, at = self.beside[value]
            made = row[at] = self._beside(width)
        else:
            head = value.dims[-1].width  # products read whole tiles, also of the last head
            room = width - head + -(-head // TILE) * TILE if head > 1 else 0
            made = self.alone(width, self._is_operand(value), rows, room)
        self.at[value.name] = made
        return made

    def side_by_side(self, values: Sequence[Value]) -> list[ValueIndex]:
        """The operands of `values`, side by side. If they are not, steps copy them to a new row first."""
        row = [self.place_of(v) for v in values]
        if len(row) == 1:
            return [self.operand(values[0])]
        if row not in self.rows:  # float32 values, or values in other rows
            sources, row = row, [self._beside(self.buffers[index].width) for index in row]
            self.rows.append([*row])
            for source, made in zip(sources, row, strict=True):
                self.emit("convert", x=source, out=made)
        return row

    def alone(self, width: int, operand: bool, rows: int = 1, room: int = 0) -> ValueIndex:
        """A new value in a row of its own, with space for max(width, room) elements.

        `rows` is the number of rows per token; 0: one row per batch.
        """
        place = "activations" if operand else "arena"
        return self.buffer(place, width, rows=self.max_tokens * rows or 1, room=_padded(max(width, room)))

    def _beside(self, width: int) -> ValueIndex:
        """A new operand, for a row that it shares with others."""
        buffer = Buffer("activations", width, rows=self.max_tokens, room=_padded(width))
        return self.add(buffer, own_row=False)

    def like(self, index: ValueIndex, **changes: Any) -> ValueIndex:
        """A new value of the same size as `index`, and of the same form unless `changes` says otherwise."""
        return self.add(replace(self.buffers[index], **changes))

    def parameter(self, weight: Weight | None) -> ParameterIndex:
        """The parameter index of a weight; ABSENT if it is None."""
        return ParameterIndex(ABSENT) if weight is None else self.parameters[weight]

    def pack(self, transposed: bool, *weights: Weight) -> PackIndex:
        """The pack that has these weights side by side."""
        key = transposed, tuple(int(self.parameters[w]) for w in weights)
        return self.packs.setdefault(key, PackIndex(len(self.packs)))

    def gradient(self, value: Value | None) -> GradientIndex:
        """The parameter whose gradient `value` is a part of; ABSENT for None."""
        return GradientIndex(ABSENT if value is None else self.of_weight[value])

    def added(self, value: Value | None) -> GradientIndex:
        """`gradient`, for a step that adds to it."""
        if value is not None:
            self.is_fresh(value)
        return self.gradient(value)

    def message(self, sender: int, receiver: int) -> tuple[int, int]:
        """The stage that the current chunk exchanges rows with, and the tag of the message.

        Activations and gradients for one chunk have different tags.
        """
        other = sender + receiver - self.chunk
        return other % self.mesh.size("pp"), 2 * receiver + (receiver < sender)

    def is_fresh(self, value: Value) -> bool:
        """True if the next step is the first to write the gradient that `value` is a part of."""
        parameter = self.of_weight[value]
        fresh = parameter not in self.begun
        self.begun.add(parameter)
        return fresh

    def _is_operand(self, value: Value) -> bool:
        """True if a value's rows are stored in the form that products read."""
        made_by = self.graph.makers[value.name]
        if any(value is made_by.outputs[place] for place in NO_OPERANDS.get(made_by.op, ())):
            return False
        floats = made_by.op in FLOAT_RESULTS or any(
            r.op in FLOAT_READERS or (r.op == "low_rank" and value in r.inputs[1:]) for r in self.graph.readers(value)
        )
        return self.operand_bytes == 4 or not floats

    # Reduction of gradients

    def reduced(self, steps: list[Step]) -> list[Step]:
        """Inserts steps that reduce ranges of gradients as soon as these are complete.

        Each gradient is in one range. All gradients of a range are summed over the same axes. The ranges are the same
        on all replicas.
        """
        tensor = {p for p, axes in self.partial.items() if "tp" in axes}
        last = {p: index for index, step in enumerate(steps) for p in step.operands(GradientIndex)}
        waiting: set[int] = set()
        result: list[Step] = []
        for index, step in enumerate(steps):
            result.append(step)
            waiting |= {int(p) for p in step.operands(GradientIndex) if last[p] == index}
            for stretch in [*_stretches(waiting - tensor), *_stretches(waiting & tensor)]:
                begin, end = self.places[stretch[0]].offset, self.places[stretch[-1]].end
                if 4 * (end - begin) >= BUCKET_BYTES or index == len(steps) - 1:
                    fields = {"begin": begin, "end": end, "tensor": stretch[0] in tensor, "kept": is_kept(end)}
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

    def keep(self, forward: list[Step], backward: list[Step]) -> int:
        """Assigns offsets in the kept memory to values that both passes use; returns its bytes for one batch."""
        row_of, total = self.row_of(), 0
        first, second = (
            {row_of[int(v)] for s in steps for v in s.operands(ValueIndex)} for steps in (forward, backward)
        )
        for row in sorted(first & second):
            self.move(row, total)
            for v in self.rows[row]:
                self.buffers[v].kept = True
            total += self.row_bytes(row)
        return total

    def stride_rows(self) -> None:
        """Sets the stride of each value, and its offset in its row. Called once all values are added."""
        for row in self.rows:
            values = [self.buffers[v] for v in row]
            values[-1].room += sum(v.room for v in values) % 32  # products read whole vectors of two bfloat16
            used = 0
            for v in values:
                v.offset = used
                used += v.room * (self.operand_bytes if v.is_operand else 4)
            for v in values:
                # an odd number of cache lines: with a large power of two, rows would share cache sets
                v.stride = (-(-used // ROW_ALIGN) | 1) * ROW_ALIGN


def is_kept(end: int) -> bool:
    """True if ZeRO keeps the pages of trained floats before `end`."""
    return end <= KEPT_FLOATS


def _padded(elements: int) -> int:
    return -(-elements // TILE) * TILE


def _stretches(numbers: set[int]) -> list[list[int]]:
    """Runs of consecutive numbers, the highest first: the backward pass completes the last gradients first."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return runs[::-1]


@dataclass(frozen=True)
class ChunkPrograms:
    """The programs of one chunk of a model's layers."""

    forward: Program  # ends in the loss, or in a send to the next chunk
    gradients: Program  # backward(forward, its output, wrt)
    wrt: tuple[Weight, ...]
    number: int = 0  # 0 also if one chunk has all layers

    @property
    def has_loss(self) -> bool:
        """True if the forward pass ends in the loss: this is the last chunk."""
        return not self.forward.outputs[0].dims


def lower_training(
    chunks: Sequence[ChunkPrograms],
    mesh: Mesh,
    max_tokens: int,
    operand_bytes: int,
    stored: frozenset[str] = frozenset(),
) -> Lowered:
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
    lowering = TrainingLowering(trained, weights, mesh, max_tokens, operand_bytes, stored)
    passes = [_passes(lowering, chunk) for chunk in chunks]
    lowering.stride_rows()
    kept = [
        0 if chunk.has_loss else lowering.keep(forward.steps, backward.steps)
        for chunk, (forward, backward) in zip(chunks, passes, strict=True)
    ]
    return Lowered(
        [one for both in passes for one in both],
        lowering.buffers,
        lowering.place([step for forward, backward in passes for step in (*backward.steps, *forward.steps)]),
        parameters=lowering.places,
        packs=list(lowering.packs),
        kept_bytes=kept,
        trained_floats=-(-lowering.places[lowering.trained - 1].end // ALIGNMENT) * ALIGNMENT,
    )


def _passes(lowering: TrainingLowering, chunk: ChunkPrograms) -> tuple[StepList, StepList]:
    """The forward and the backward pass of a chunk. With the loss, the backward pass runs the forward pass too."""
    lowering.chunk = chunk.number
    steps = lowering.lowered(chunk.gradients, chunk.wrt)
    sends = 0 if chunk.has_loss else 1 + next(i for i, step in enumerate(steps) if step.kind == "send_rows")
    backward = lowering.reduced(steps[sends:])
    forward = lowering.lowered(chunk.forward) if chunk.has_loss else steps[:sends]
    return StepList(forward), StepList(backward, lowering.cleared(backward))

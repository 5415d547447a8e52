"""Lowering of training: a loss and what `backward` made of it become the two lists of steps that the native replay walks.

An instruction is one step, but for these: gradients of weights are added to their place in the arena of gradients, so what would add
two of them is none; the loss and its gradient are one step, so that logits are computed once; an all_reduce of gradients is
begun for whole stretches of the arena as soon as all of it is complete. Matching is total: an instruction that has no step is an error here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckdist.errors import LayoutError
from ckdist.layout import Mesh
from ckdist.program.lower import GATES, ROPE_TABLES
from ckdist.program.program import Instr, Program, Value, Weight

ALIGN = 64
ALIGNMENT = 16  # floats between the beginnings of parameters: a cache line
BUCKET_BYTES = 1 << 20  # a shorter stretch of gradients waits for its neighbours


@dataclass
class TrainingStep:
    """One native step; operands are indices into values, packs and parameters."""

    op: str
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    packs: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)
    ints: list[int] = field(default_factory=list)
    floats: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Parameter:
    """A weight's place: `offset` floats into the arenas. A vector has one row."""

    name: str
    offset: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.offset + self.rows * self.columns


@dataclass
class LoweredTraining:
    """`values[i]` is (byte offset in the arena, floats per token); `packs[i]` (turned, parameters that lie side by side)."""

    steps: list[TrainingStep]
    loss_steps: list[TrainingStep]
    values: list[tuple[int, int]]
    parameters: list[Parameter]
    packs: list[tuple[bool, tuple[int, ...]]]
    arena_bytes: int
    trained_floats: int  # of the arena's beginning: the parameters that have gradients

    @property
    def floats(self) -> int:
        """Of all parameters."""
        return -(-self.parameters[-1].end // ALIGNMENT) * ALIGNMENT


class _Lowering:
    def __init__(self, wrt: Sequence[Weight], weights: Sequence[Weight], mesh: Mesh):
        self.mesh = mesh
        self.packs: dict[tuple, int] = {}
        self.widths: list[int] = []
        self.parameters: dict[Weight, int] = {}
        self.places: list[Parameter] = []
        offset = 0
        for weight in dict.fromkeys((*wrt, *weights)):
            shape = [d.elements for d in weight.dims]
            rows, columns = shape if len(shape) == 2 else (1, shape[0])
            self.parameters[weight] = len(self.places)
            self.places.append(Parameter(weight.name, offset, rows, columns))
            offset = -(-self.places[-1].end // ALIGNMENT) * ALIGNMENT
        self.wrt = list(dict.fromkeys(wrt))

    def steps(self, program: Program) -> list[TrainingStep]:
        """The steps of one program. Values are numbered on from those of programs before it."""
        self.emitted: list[TrainingStep] = []
        self.values: dict[Value, int] = {}
        self.of_weight = {}  # value -> the parameter of whose gradient it is a part
        for weight, output in zip(self.wrt, program.outputs[1:]):
            self._claim(output, self.parameters[weight], {o: i for i in program.instrs for o in i.outputs})
        self.read = {v for i in program.instrs for v in i.inputs}
        for instr in program.instrs:
            handler = getattr(self, f"_{instr.op}", None)
            if handler is None:
                raise LayoutError(f"training has no native step for {instr.op}: {instr}")
            handler(instr)
        return self.emitted

    def _claim(self, value: Value, parameter: int, made_by: dict[Value, Instr]) -> None:
        instr = made_by[value]
        self.of_weight[value] = parameter
        if instr.op in ("add", "all_reduce"):
            for part in instr.inputs:
                self._claim(part, parameter, made_by)

    # Operands

    def _step(self, op: str, instr: Instr, inputs=None, outputs=None, **more) -> None:
        sources = [self.values[v] for v in (instr.inputs if inputs is None else inputs)]
        results = [self._output(v) for v in (instr.outputs if outputs is None else outputs)]
        self.emitted.append(TrainingStep(op, sources, results, **more))

    def _output(self, value: Value) -> int:
        self.values[value] = len(self.widths)
        self.widths.append(value.dims[-1].local(self.mesh))
        return self.values[value]

    def _pack(self, turned: bool, *weights: Weight) -> int:
        return self.packs.setdefault((turned, tuple(self.parameters[w] for w in weights)), len(self.packs))

    # Instructions, by op

    def _embed(self, i: Instr) -> None:
        self._step("embed", i, [], parameters=[self.parameters[i.weights[0]]])

    def _scale(self, i: Instr) -> None:
        self._step("scale", i, floats=[i.attrs["factor"]])

    def _add(self, i: Instr) -> None:
        if i.outputs[0] not in self.of_weight:
            self._step("add", i)

    def _all_reduce(self, i: Instr) -> None:
        if i.inputs[0].dims and i.inputs[0] not in self.of_weight:
            raise LayoutError(f"training computes on whole values; only gradients of weights and the loss are reduced: {i}")

    def _rms_norm(self, i: Instr) -> None:
        self._step("rms_norm", i, parameters=[self.parameters[i.weights[0]]], ints=[i.weights[0].dims[0].elements], floats=[i.attrs["eps"]])

    def _rms_norm_grad(self, i: Instr) -> None:
        self._step(
            "rms_norm_grad",
            i,
            outputs=i.outputs[:1],
            parameters=[self.parameters[i.weights[0]]],
            gradients=[self.of_weight[o] for o in i.outputs[1:]],
            ints=[i.weights[0].dims[0].elements],
            floats=[i.attrs["eps"]],
        )

    def _linear(self, i: Instr) -> None:
        count = len(i.weights) // 2
        biases = [-1 if b is None else self.parameters[b] for b in i.weights[count:]]
        self._step("linear", i, packs=[self._pack(False, w) for w in i.weights[:count]], parameters=biases)

    def _linear_grad(self, i: Instr) -> None:
        self._step("linear_grad", i, packs=[self._pack(True, *i.weights)])

    def _linear_weight_grad(self, i: Instr) -> None:
        self._step("linear_weight_grad", i, outputs=[], gradients=[self.of_weight[o] for o in i.outputs])

    def _bias_grad(self, i: Instr) -> None:
        self._step("bias_grad", i, outputs=[], gradients=[self.of_weight[o] for o in i.outputs])

    def _rope(self, i: Instr, back: int = 0) -> None:
        self._step("rope", i, ints=[ROPE_TABLES[i.attrs["table"]], back])

    def _rope_grad(self, i: Instr) -> None:
        self._rope(i, 1)

    def _attend_packed(self, i: Instr) -> None:
        self._step("attend", i, ints=[i.attrs["window"]], floats=[i.attrs["scale"], i.attrs["soft_cap"]])

    def _attend_grad(self, i: Instr) -> None:
        self._step("attend_grad", i, ints=[i.attrs["window"]], floats=[i.attrs["scale"], i.attrs["soft_cap"]])

    def _gated(self, i: Instr) -> None:
        self._step("gated", i, ints=[GATES[i.attrs["function"]]])

    def _gated_grad(self, i: Instr) -> None:
        self._step("gated_grad", i, ints=[GATES[i.attrs["function"]]])

    def _one(self, i: Instr) -> None:
        pass  # the gradients are those of the loss itself

    def _cross_entropy(self, i: Instr) -> None:
        if i.outputs[1] not in self.read:  # else its gradient computes it too
            self._step("cross_entropy", i, i.inputs[:1], [], packs=[self._pack(False, i.weights[0])], floats=[i.attrs["soft_cap"]])

    def _cross_entropy_grad(self, i: Instr) -> None:
        head = i.weights[0]
        self._step(
            "cross_entropy",
            i,
            i.inputs[:1],
            i.outputs[:1],
            packs=[self._pack(False, head), self._pack(True, head)],
            gradients=[self.of_weight[o] for o in i.outputs[1:]],
            floats=[i.attrs["soft_cap"]],
        )

    def _embed_grad(self, i: Instr) -> None:
        self._step("embed_grad", i, i.inputs[1:], [], gradients=[self.of_weight[i.outputs[0]]])

    # Gradients, as soon as they are complete

    def reduced(self, steps: list[TrainingStep]) -> list[TrainingStep]:
        """`steps` with reduces between them; every gradient is in one, and they are the same on every rank."""
        last = {p: index for index, step in enumerate(steps) for p in step.gradients}
        waiting, result = set(), []
        for index, step in enumerate(steps):
            result.append(step)
            waiting |= {p for p in step.gradients if last[p] == index}
            for stretch in _stretches(waiting):
                begin, end = self.places[stretch[0]].offset, self.places[stretch[-1]].end
                if 4 * (end - begin) >= BUCKET_BYTES or index == len(steps) - 1:
                    result.append(TrainingStep("reduce", ints=[begin, end]))
                    waiting -= set(stretch)
        return result

    # Memory

    def place(self, lists: Sequence[list[TrainingStep]], max_tokens: int) -> tuple[list[tuple[int, int]], int]:
        """(byte offset, width) of every value, first fit over the steps of its life, and the bytes of the arena."""
        first, last = {}, {}
        time = 0
        for steps in lists:
            for step in steps:
                for v in (*step.inputs, *step.outputs):
                    first.setdefault(v, time)
                    last[v] = time
                time += 1
        size = [-(-4 * width * max_tokens // ALIGN) * ALIGN for width in self.widths]
        offsets, placed, total = {}, [], 0
        for v in sorted(first, key=lambda v: (-size[v], first[v])):
            offset = 0
            for begin, end, other in sorted(placed):
                if first[v] <= last[other] and first[other] <= last[v] and offset + size[v] > begin:
                    offset = max(offset, end)
            offsets[v] = offset
            placed.append((offset, offset + size[v], v))
            total = max(total, offset + size[v])
        return [(offsets[v], width) for v, width in enumerate(self.widths)], total


def _stretches(numbers: set[int]) -> list[list[int]]:
    """Runs of consecutive numbers, the highest first: gradients are complete from the end on."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return runs[::-1]


def lower_training(loss: Program, gradients: Program, wrt: Sequence[Weight], mesh: Mesh, max_tokens: int) -> LoweredTraining:
    """The steps of a rank for batches of up to `max_tokens` tokens; `gradients` is backward(loss, its output, wrt).

    Raises LayoutError for an instruction that the replay has no step for.
    """
    lowering = _Lowering(wrt, loss.weights, mesh)
    steps = lowering.reduced(lowering.steps(gradients))
    loss_steps = lowering.steps(loss)
    values, arena_bytes = lowering.place([steps, loss_steps], max_tokens)
    trained = -(-lowering.places[len(lowering.wrt) - 1].end // ALIGNMENT) * ALIGNMENT
    return LoweredTraining(steps, loss_steps, values, lowering.places, list(lowering.packs), arena_bytes, trained)

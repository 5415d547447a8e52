"""Lowering of training: a loss and what `backward` made of it become the two lists of steps that the native replay
walks.

An instruction is one step, but for these: gradients of weights are added to their place in the arena of gradients, so
what would add two of them is none; the loss and its gradient are one step, so that logits are computed once; an
all_reduce of gradients is begun for whole stretches of the arena as soon as all of it is complete. Matching is total:
an instruction that has no step is an error here.

A value is an *operand* where it can be: its rows stand as products read them (in bfloat16 where they multiply in it),
so that nothing is converted on the way into one. What is added up over the layers, and what a loss is made of, stays in
floats. Gradients that one product reads lie side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckdist.errors import LayoutError
from ckdist.layout import Mesh
from ckdist.program.arena import first_fit
from ckdist.program.lower import layer_attention
from ckdist.program.lowered import GATES, ROPE_TABLES, LayerAttention
from ckdist.program.program import Instr, Program, Value, Weight

ALIGN = 64
UNPLACED = -1  # a value of a row, before the step that makes it
ALIGNMENT = 16  # floats between the beginnings of parameters: a cache line
BUCKET_BYTES = 1 << 20  # a shorter stretch of gradients waits for its neighbours
FLOAT_RESULTS = {"embed", "scale", "add", "cross_entropy_grad"}  # ops of which every value is in floats,
FLOAT_READERS = {"scale", "add", "embed_grad"}  # and ops that read floats


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
        """One after its last float."""
        return self.offset + self.rows * self.columns


@dataclass
class PlacedValue:
    """`width` elements a token, with room for `room` of them in a row of `stride` bytes; the first is at `offset` in
    the arena.
    """

    width: int
    room: int
    operand: bool
    stride: int = 0
    offset: int = 0


@dataclass
class LoweredTraining:
    """`packs[i]` is (transposed, parameters that lie side by side)."""

    steps: list[TrainingStep]
    loss_steps: list[TrainingStep]
    values: list[PlacedValue]
    parameters: list[Parameter]
    packs: list[tuple[bool, tuple[int, ...]]]
    arena_bytes: int
    attention: LayerAttention  # of every layer
    trained_floats: int  # of the arena's beginning: the parameters that have gradients

    @property
    def floats(self) -> int:
        """Of all parameters."""
        return -(-self.parameters[-1].end // ALIGNMENT) * ALIGNMENT


class _Lowering:
    def __init__(self, wrt: Sequence[Weight], weights: Sequence[Weight], mesh: Mesh, operand_bytes: int):
        self.mesh, self.operand_bytes = mesh, operand_bytes
        self.packs: dict[tuple[bool, tuple[int, ...]], int] = {}
        self.placed: list[PlacedValue] = []
        self.rows: list[list[int]] = []  # values that lie side by side; most are alone
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
        self.attention: LayerAttention | None = None  # of every layer

    def steps(self, program: Program) -> list[TrainingStep]:
        """The steps of one program. Values are numbered on from those of programs before it."""
        self.emitted: list[TrainingStep] = []
        self.values: dict[Value, int] = {}
        self.of_weight: dict[Value, int] = {}  # value -> the parameter of whose gradient it is a part
        for weight, output in zip(self.wrt, program.outputs[1:], strict=False):
            self._claim(output, self.parameters[weight], {o: i for i in program.instrs for o in i.outputs})
        self.readers: dict[Value, list[Instr]] = {}
        for instr in program.instrs:
            for v in instr.inputs:
                self.readers.setdefault(v, []).append(instr)
        made_by = {o: i for i in program.instrs for o in i.outputs}
        self.beside: dict[
            Value, tuple[list[int], int]
        ] = {}  # the row that a value shares with others, and its place there
        for instr in program.instrs:
            together = instr.op == "linear_grad" and len(instr.inputs) > 1
            if together and all(v not in self.beside and self._is_operand(v, made_by[v]) for v in instr.inputs):
                self.rows.append([UNPLACED] * len(instr.inputs))
                self.beside |= {v: (self.rows[-1], at) for at, v in enumerate(instr.inputs)}
        self.operands: dict[Value, int] = {}  # operands made of values in floats
        for instr in program.instrs:
            handler = getattr(self, f"_{instr.op}", None)
            if handler is None:
                raise LayoutError(f"training has no native step for {instr.op}: {instr}")
            handler(instr)
        begun: set[int] = set()
        for step in self.emitted:  # a product over all tokens can overwrite what is to be cleared
            if step.op in ("linear_weight_grad", "cross_entropy"):
                step.ints = [sum(1 << place for place, p in enumerate(step.gradients) if p not in begun)]
            begun.update(step.gradients)
        return self.emitted

    def _claim(self, value: Value, parameter: int, made_by: dict[Value, Instr]) -> None:
        """Says that a value, and what is added up to it, are parts of a parameter's gradient."""
        instr = made_by[value]
        self.of_weight[value] = parameter
        if instr.op in ("add", "all_reduce"):
            for part in instr.inputs:
                self._claim(part, parameter, made_by)

    # Operands

    def _step(
        self,
        op: str,
        instr: Instr,
        inputs: Sequence[Value] | None = None,
        outputs: Sequence[Value] | None = None,
        operands: bool = False,
        **more: Any,
    ) -> None:
        """Emits a step that reads and writes the instruction's values, or those that are given instead."""
        inputs = instr.inputs if inputs is None else inputs
        sources = [self._operand(v) if operands else self.values[v] for v in inputs]
        results = [self._output(v, instr) for v in (instr.outputs if outputs is None else outputs)]
        self.emitted.append(TrainingStep(op, sources, results, **more))

    def _place(self, width: int, operand: bool) -> int:
        """A new value of `width` elements a token; returns its index."""
        self.placed.append(PlacedValue(width, -(-width // 16) * 16, operand))
        return len(self.placed) - 1

    def _alone(self, width: int, operand: bool) -> int:
        """A new value in a row of its own; returns its index."""
        self.rows.append([self._place(width, operand)])
        return self.rows[-1][0]

    def _is_operand(self, value: Value, made_by: Instr) -> bool:
        """Whether a value's rows stand as products read them."""
        if made_by.op == "attend_packed" and value is made_by.outputs[1]:
            return False
        floats = made_by.op in FLOAT_RESULTS or any(r.op in FLOAT_READERS for r in self.readers.get(value, ()))
        return self.operand_bytes == 4 or not floats

    def _output(self, value: Value, instr: Instr) -> int:
        """The index of a value that `instr` makes, in its row."""
        width = value.dims[-1].local(self.mesh)
        if value in self.beside:
            row, at = self.beside[value]
            row[at] = self._place(width, True)
            self.values[value] = row[at]
        else:
            self.values[value] = self._alone(width, self._is_operand(value, instr))
        return self.values[value]

    def _operand(self, value: Value) -> int:
        """The value as products read it."""
        index = self.values[value]
        if self.placed[index].operand:
            return index
        if value not in self.operands:
            self.operands[value] = self._alone(self.placed[index].width, True)
            self.emitted.append(TrainingStep("operand", [index], [self.operands[value]]))
        return self.operands[value]

    def _pack(self, transposed: bool, *weights: Weight) -> int:
        """The index of the pack in which these weights lie side by side."""
        return self.packs.setdefault((transposed, tuple(self.parameters[w] for w in weights)), len(self.packs))

    # Instructions, by op

    def _embed(self, i: Instr) -> None:
        """One step."""
        self._step("embed", i, [], parameters=[self.parameters[i.weight(0)]])

    def _scale(self, i: Instr) -> None:
        """One step."""
        self._step("scale", i, floats=[i.attrs["factor"]])

    def _add(self, i: Instr) -> None:
        """One step; none for gradients of weights, or where the step of an operand can add the other."""
        if i.outputs[0] in self.of_weight:
            return
        a, b = (self.values[v] for v in i.inputs)
        for value, own, other in ((i.inputs[1], b, a), (i.inputs[0], a, b)):
            if a != b and self.readers[value] == [i] and self._add_to(own, other):
                self.values[i.outputs[0]] = own
                return
        self._step("add", i)

    def _add_to(self, value: int, other: int) -> bool:
        """Whether the step that makes `value` now adds `other` to it."""
        for step in reversed(self.emitted):
            if other in step.outputs:
                return False  # made later
            if value in step.outputs:
                most = {"linear": 1, "rms_norm_grad": 2}.get(step.op, 0)
                if len(step.inputs) != most or len(step.outputs) != 1:
                    return False
                step.inputs.append(other)
                return True
        return False

    def _all_reduce(self, i: Instr) -> None:
        """No step: `reduced` says when. LayoutError for a value inside of the layers."""
        if i.inputs[0].dims and i.inputs[0] not in self.of_weight:
            raise LayoutError(
                f"training computes on whole values; only gradients of weights and the loss are reduced: {i}"
            )

    def _rms_norm(self, i: Instr) -> None:
        """One step."""
        self._step(
            "rms_norm",
            i,
            parameters=[self.parameters[i.weight(0)]],
            ints=[i.weight(0).dims[0].elements],
            floats=[i.attrs["eps"]],
        )

    def _rms_norm_grad(self, i: Instr) -> None:
        """One step; the gradient by the weight is added to its place."""
        self._step(
            "rms_norm_grad",
            i,
            outputs=i.outputs[:1],
            parameters=[self.parameters[i.weight(0)]],
            gradients=[self.of_weight[o] for o in i.outputs[1:]],
            ints=[i.weight(0).dims[0].elements],
            floats=[i.attrs["eps"]],
        )

    def _linear(self, i: Instr) -> None:
        """One step for all its matrices."""
        biases = [-1 if b is None else self.parameters[b] for b in i.weights[len(i.weights) // 2 :]]
        self._step("linear", i, operands=True, packs=[self._pack(False, w) for w in i.matrices], parameters=biases)

    def _linear_grad(self, i: Instr) -> None:
        """One step; gradients that do not lie side by side are copied first."""
        row = [self.values[v] for v in i.inputs]
        if len(row) > 1 and row not in self.rows:  # floats, or beside others elsewhere
            sources, row = row, [self._place(self.placed[index].width, True) for index in row]
            self.rows.append(row)
            self.emitted += [
                TrainingStep("operand", [source], [operand]) for source, operand in zip(sources, row, strict=True)
            ]
        elif len(row) == 1:
            row = [self._operand(i.inputs[0])]
        results = [self._output(i.outputs[0], i)]
        self.emitted.append(
            TrainingStep(
                "linear_grad", row, results, packs=[self._pack(True, *(i.weight(n) for n in range(len(i.weights))))]
            )
        )

    def _linear_weight_grad(self, i: Instr) -> None:
        """One step that adds to the gradients' places."""
        self._step("linear_weight_grad", i, outputs=[], operands=True, gradients=[self.of_weight[o] for o in i.outputs])

    def _bias_grad(self, i: Instr) -> None:
        """One step that adds to the gradients' places."""
        self._step("bias_grad", i, outputs=[], gradients=[self.of_weight[o] for o in i.outputs])

    def _rope(self, i: Instr, back: int = 0) -> None:
        """One step, forth or back."""
        self._step("rope", i, ints=[ROPE_TABLES[i.attrs["table"]], back])

    def _rope_grad(self, i: Instr) -> None:
        """The rotation back."""
        self._rope(i, 1)

    def _attend_packed(self, i: Instr) -> None:
        """One step. LayoutError where heads differ from another layer's."""
        attention = layer_attention(i, self.mesh)
        if (
            len(set(attention.heads_per_kv)) > 1
            or attention != (self.attention or attention)
            or (attention.key_width != attention.value_width)
        ):
            raise LayoutError(f"training needs the same heads in every layer, and keys as wide as values: {i}")
        self.attention = attention
        self._step("attend", i, operands=True, ints=[i.attrs["window"]], floats=[i.attrs["scale"], i.attrs["soft_cap"]])

    def _attend_grad(self, i: Instr) -> None:
        """One step."""
        q, k, v, o, lse, d_o = i.inputs
        inputs = [
            self._operand(q),
            self._operand(k),
            self._operand(v),
            self._operand(o),
            self.values[lse],
            self._operand(d_o),
        ]
        results = [self._output(d, i) for d in i.outputs]
        self.emitted.append(
            TrainingStep(
                "attend_grad", inputs, results, ints=[i.attrs["window"]], floats=[i.attrs["scale"], i.attrs["soft_cap"]]
            )
        )

    def _gated(self, i: Instr) -> None:
        """One step."""
        self._step("gated", i, ints=[GATES[i.attrs["function"]]])

    def _gated_grad(self, i: Instr) -> None:
        """One step."""
        self._step("gated_grad", i, ints=[GATES[i.attrs["function"]]])

    def _one(self, i: Instr) -> None:
        """No step: the gradients are those of the loss itself."""

    def _cross_entropy(self, i: Instr) -> None:
        """One step; none where that of its gradient computes the loss too."""
        if i.outputs[1] not in self.readers:  # else its gradient computes it too
            self._step(
                "cross_entropy",
                i,
                i.inputs[:1],
                [],
                operands=True,
                packs=[self._pack(False, i.weight(0))],
                floats=[i.attrs["soft_cap"]],
            )

    def _cross_entropy_grad(self, i: Instr) -> None:
        """One step for the loss and its gradients."""
        head = i.weight(0)
        self._step(
            "cross_entropy",
            i,
            i.inputs[:1],
            i.outputs[:1],
            operands=True,
            packs=[self._pack(False, head), self._pack(True, head)],
            gradients=[self.of_weight[o] for o in i.outputs[1:]],
            floats=[i.attrs["soft_cap"]],
        )

    def _embed_grad(self, i: Instr) -> None:
        """One step that adds to the table's place."""
        self._step("embed_grad", i, i.inputs[1:], [], gradients=[self.of_weight[i.outputs[0]]])

    # Gradients, as soon as they are complete

    def reduced(self, steps: list[TrainingStep]) -> list[TrainingStep]:
        """`steps` with reduces between them; every gradient is in one, and they are the same on every rank."""
        last = {p: index for index, step in enumerate(steps) for p in step.gradients}
        waiting: set[int] = set()
        result: list[TrainingStep] = []
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

    def place(self, lists: Sequence[list[TrainingStep]], max_tokens: int) -> int:
        """Gives every value its place: a row lives over the steps that use a value of it. The bytes of the arena."""
        row_of = {v: r for r, row in enumerate(self.rows) for v in row}
        steps = [step for steps in lists for step in steps]
        uses = [(time, row_of[v]) for time, step in enumerate(steps) for v in (*step.inputs, *step.outputs)]
        for row in self.rows:
            values = [self.placed[v] for v in row]
            values[-1].room += sum(v.room for v in values) % 32  # products read whole vectors of two bfloat16
            used = sum(v.room * (self.operand_bytes if v.operand else 4) for v in values)
            for v in values:
                # no multiple of a large power of two, or rows share sets of the caches
                v.stride = (-(-used // ALIGN) | 1) * ALIGN
        offsets, total = first_fit(uses, lambda r: max_tokens * self.placed[self.rows[r][0]].stride)
        for r, begin in offsets.items():
            offset = begin
            for v in self.rows[r]:
                self.placed[v].offset = offset
                offset += self.placed[v].room * (self.operand_bytes if self.placed[v].operand else 4)
        return total


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
    loss: Program, gradients: Program, wrt: Sequence[Weight], mesh: Mesh, max_tokens: int, operand_bytes: int
) -> LoweredTraining:
    """The steps of a rank for batches of up to `max_tokens` tokens; `gradients` is backward(loss, its output, wrt).

    `operand_bytes`: of an element of an operand, 2 or 4.

    Raises LayoutError for an instruction that the replay has no step for.
    """
    lowering = _Lowering(wrt, loss.weights, mesh, operand_bytes)
    steps = lowering.reduced(lowering.steps(gradients))
    loss_steps = lowering.steps(loss)
    arena_bytes = lowering.place([steps, loss_steps], max_tokens)
    if lowering.attention is None:
        raise LayoutError("training needs a layer with attention")
    trained = -(-lowering.places[len(lowering.wrt) - 1].end // ALIGNMENT) * ALIGNMENT
    return LoweredTraining(
        steps,
        loss_steps,
        lowering.placed,
        lowering.places,
        list(lowering.packs),
        arena_bytes,
        lowering.attention,
        trained,
    )

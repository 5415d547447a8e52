"""A stage: the slice of a program between two of its boundaries, with what it receives and what it sends.

A boundary is a value from which alone what follows can be computed, so a slice needs nothing else of what came before,
and of the batch every rank has all. Nothing is traced again: a stage's instructions are the whole program's, and so are
its bits. But a tally of experts is of all layers: each stage adds those of its own to what it receives.
"""

from dataclasses import dataclass, replace

from ckdist.errors import LayoutError
from ckdist.layout import Range
from ckdist.mesh import WHOLE, Mesh
from ckdist.program.ops import OPS
from ckdist.program.ops.op import axes
from ckdist.program.ops.stages import received_dims
from ckdist.program.ops.tally import layers_of
from ckdist.program.program import Instr, Program, Value


@dataclass(frozen=True)
class Stage:
    """One of `count` stages, the `number`-th from 0, which has layers [begin, end) of a model's.

    The first has the embedding as well, the last the head.
    """

    number: int
    count: int
    layers: Range

    @property
    def first(self) -> bool:
        """Whether it begins with the tokens."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it ends with the logits."""
        return self.number == self.count - 1

    def program(self, whole: Program, mesh: Mesh) -> Program:
        """This stage's part of a program on the mesh of its ranks; the program itself where there is one stage.

        LayoutError where the program has no such boundaries.
        """
        if self.count == 1:
            return whole
        begin, end = self.layers
        if not 0 <= begin < end < len(whole.boundaries):
            raise LayoutError(f"layers {begin} to {end} are no slice of the {len(whole.boundaries) - 1} of the program")
        makers = {v.name: i for i, instr in enumerate(whole.instrs) for v in instr.outputs}
        entry, exit_ = whole.boundaries[begin], whole.boundaries[end]
        start = 0 if self.first else makers[entry.name] + 1
        until = len(whole.instrs) if self.last else makers[exit_.name] + 1
        tally = _StageTally.of(whole, start, until)
        instrs = [] if self.first else _received(whole.inputs[0], entry, tally.received, self.number - 1, mesh)
        for instr in whole.instrs[start:until]:
            instrs += tally.adding if instr.op == "tally" else [instr]
        outputs = whole.outputs
        if not self.last:
            sent, names = (exit_, *tally.total), ("sent", "sent_tally")
            instrs += [*tally.adding, _instr("send", sent, names, to=self.number + 1, axis=_sharing(exit_, mesh))]
            outputs = instrs[-1].outputs
        return Program(whole.inputs, outputs, tuple(instrs), whole.boundaries[begin : end + 1])


@dataclass(frozen=True)
class _StageTally:
    """What a stage makes of a program's tally: one value or none of each. `received`: of the layers before; `adding`:
    what adds the stage's own; `total`: of both.
    """

    received: tuple[Value, ...] = ()
    adding: tuple[Instr, ...] = ()
    total: tuple[Value, ...] = ()

    @staticmethod
    def of(whole: Program, start: int, until: int) -> "_StageTally":
        """Of the stage that has the program's instructions [start, until)."""
        found = next((instr for instr in whole.instrs if instr.op == "tally"), None)
        if found is None:
            return _StageTally()
        made_at = {v: i for i, instr in enumerate(whole.instrs) for v in instr.outputs}
        layers = [(made_at[logits], logits, chosen) for logits, chosen in layers_of(found.inputs)]
        own = [v for at, *layer in layers if start <= at < until for v in layer]
        before = [replace(v, name=f"{v.name}.before") for v in found.outputs if layers[0][0] < start]
        if not own:  # what is received is all, under its name
            total = found.outputs if before else ()
            return _StageTally(total, (), total)
        adding = replace(found, inputs=(found.inputs[0], *own, *before))
        return _StageTally(tuple(before), (adding,), found.outputs)


def _received(ids: Value, value: Value, tally: tuple[Value, ...], stage: int, mesh: Mesh) -> list[Instr]:
    """What makes `value`, and a tally, of what the previous stage sends. Ranks that have all tokens share the rows, and
    add up.
    """
    axis, names = _sharing(value, mesh), [value.name, *(v.name for v in tally)]
    attrs = {"axis": axis, "stage": stage, **received_dims(value, *tally)}
    if axis is None:
        return [_instr("recv", (ids,), tuple(names), **attrs)]
    recv = _instr("recv", (ids,), (f"{value.name}.rows", *names[1:]), **attrs)
    return [recv, _instr("all_reduce", recv.outputs[:1], (value.name,), axis=axis)]


def _sharing(value: Value, mesh: Mesh) -> str | None:
    """The axis among whose ranks the rows of a value are shared on their way; None: each rank has its own rows."""
    return None if value.dims[0].axis == WHOLE or mesh.size(WHOLE) == 1 else WHOLE


def _instr(op: str, inputs: tuple[Value, ...], names: tuple[str, ...], **attrs: object) -> Instr:
    """An instruction whose outputs have these names, or the first of them."""
    inferred = OPS[op].infer(inputs, (), attrs)
    outputs = tuple(
        Value(name, dims, "f32", axes(partial)) for name, (dims, partial) in zip(names, inferred, strict=False)
    )
    return Instr(op, inputs, outputs, (), attrs)


__all__ = ["Stage"]

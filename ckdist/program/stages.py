"""A stage: the slice of a program between two of its boundaries, with what it receives and what it sends.

A boundary is a value from which alone what follows can be computed, so a slice needs nothing else of what came before,
and of the batch every rank has all. Nothing is traced again: a stage's instructions are the whole program's, and so are
its bits.
"""

from dataclasses import dataclass

from ckdist.errors import LayoutError
from ckdist.layout import Range
from ckdist.mesh import WHOLE, Mesh
from ckdist.program.ops import OPS
from ckdist.program.ops.op import axes
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
        until = len(whole.instrs) if self.last else makers[exit_.name] + 1
        instrs = list(whole.instrs[0 if self.first else makers[entry.name] + 1 : until])
        if not self.first:
            instrs[:0] = _received(whole.inputs[0], entry, self.number - 1, mesh)
        outputs = whole.outputs
        if not self.last:
            instrs.append(_instr("send", (exit_,), ("sent",), to=self.number + 1, axis=_sharing(exit_, mesh)))
            outputs = instrs[-1].outputs
        return Program(whole.inputs, outputs, tuple(instrs), whole.boundaries[begin : end + 1])


def _received(ids: Value, value: Value, stage: int, mesh: Mesh) -> list[Instr]:
    """What makes `value` of what the previous stage sends. Ranks that have all tokens share its rows, and add up."""
    axis = _sharing(value, mesh)
    if axis is None:
        return [_instr("recv", (ids,), (value.name,), hidden=value.dims[1], axis=None, stage=stage)]
    recv = _instr("recv", (ids,), (f"{value.name}.rows",), hidden=value.dims[1], axis=axis, stage=stage)
    return [recv, _instr("all_reduce", recv.outputs, (value.name,), axis=axis)]


def _sharing(value: Value, mesh: Mesh) -> str | None:
    """The axis among whose ranks the rows of a value are shared on their way; None: each rank has its own rows."""
    return None if value.dims[0].axis == WHOLE or mesh.size(WHOLE) == 1 else WHOLE


def _instr(op: str, inputs: tuple[Value, ...], names: tuple[str, ...], **attrs: object) -> Instr:
    """An instruction whose outputs have these names."""
    inferred = OPS[op].infer(inputs, (), attrs)
    outputs = tuple(
        Value(name, dims, "f32", axes(partial)) for name, (dims, partial) in zip(names, inferred, strict=True)
    )
    return Instr(op, inputs, outputs, (), attrs)


__all__ = ["Stage"]

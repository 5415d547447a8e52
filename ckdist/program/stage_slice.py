"""A pipeline stage: the slice of a program between two of its boundaries, with a receive and a send.

The instructions after a boundary depend only on its value and on the batch. Each rank has the whole batch, so a stage
receives only the value, and the `carried` values that it reads, side by side in one row. A stage has the instructions
of the whole program, without tracing again, so its bits are the same. A tally of experts covers all layers: each stage
adds its own layers to the tally that it receives.
"""

from dataclasses import dataclass, replace

from ckdist.errors import LayoutError
from ckdist.mesh import WHOLE, Mesh
from ckdist.program.ops import op_named
from ckdist.program.pipeline_stage import Stage
from ckdist.program.program import Instr, Program, Value


def stage_program(stage: Stage, whole: Program, mesh: Mesh) -> Program:
    """`Stage.program` of a model with several stages."""
    begin, end = stage.layers
    if not 0 <= begin < end < len(whole.boundaries):
        raise LayoutError(f"layers {begin} to {end} are no slice of the {len(whole.boundaries) - 1} of the program")
    makers = {v.name: i for i, instr in enumerate(whole.instrs) for v in instr.outputs}
    entry, exit_ = whole.boundaries[begin], whole.boundaries[end]
    start = 0 if stage.first else makers[entry.name] + 1
    until = len(whole.instrs) if stage.last else makers[exit_.name] + 1
    tally = _StageTally.of(whole, start, until)
    before, after = _carried(whole, makers, start), _carried(whole, makers, until)
    received = [entry, *before], tally.received
    instrs = [] if stage.first else _received(whole.inputs[0], *received, stage.number - 1, mesh)
    for instr in whole.instrs[start:until]:
        instrs += tally.adding if instr.op == "tally" else [instr]
    outputs = whole.outputs
    if not stage.last:
        sent, names = (exit_, *after, *tally.total), ("sent", *("sent_" + v.name for v in after), "sent_tally")
        instrs += [*tally.adding, _instr("send", sent, names, to=stage.number + 1, axis=_sharing(exit_, mesh))]
        outputs = instrs[-1].outputs
    return Program(whole.inputs, outputs, tuple(instrs), whole.boundaries[begin : end + 1])


def _carried(whole: Program, makers: dict[str, int], at: int) -> list[Value]:
    """The carried values that instructions before `at` make, and later ones read."""
    read = {v.name for instr in whole.instrs[at:] for v in instr.inputs}
    return [v for v in whole.carried if makers[v.name] < at and v.name in read]


@dataclass(frozen=True)
class _StageTally:
    """A stage's part of a program's tally. Each field has one item or none."""

    received: tuple[Value, ...] = ()  # the tally of the stages before
    adding: tuple[Instr, ...] = ()  # the instruction that adds the stage's own layers
    total: tuple[Value, ...] = ()  # the sum of both

    @staticmethod
    def of(whole: Program, start: int, until: int) -> "_StageTally":
        """The tally of the stage that has instructions [start, until) of the program."""
        found = next((instr for instr in whole.instrs if instr.op == "tally"), None)
        if found is None:
            return _StageTally()
        from ckdist.program.ops.tally import layers_of

        made_at = {v: i for i, instr in enumerate(whole.instrs) for v in instr.outputs}
        layers = [(made_at[logits], logits, chosen) for logits, chosen in layers_of(found.inputs)]
        own = [v for at, *layer in layers if start <= at < until for v in layer]
        before = [replace(v, name=f"{v.name}.before") for v in found.outputs if layers[0][0] < start]
        if not own:  # the received tally is the total
            total = found.outputs if before else ()
            return _StageTally(total, (), total)
        adding = replace(found, inputs=(found.inputs[0], *own, *before))
        return _StageTally(tuple(before), (adding,), found.outputs)


def _received(ids: Value, values: list[Value], tally: tuple[Value, ...], stage: int, mesh: Mesh) -> list[Instr]:
    """The instructions that receive `values`, and a tally, from the previous stage.

    If all ranks have all tokens, each receives a part of the rows, and an all_reduce completes them.
    """
    from ckdist.program.ops.stage_transfer import received_dims

    axis, names = _sharing(values[0], mesh), [v.name for v in values]
    attrs = {"axis": axis, "stage": stage, **received_dims(*values, *tally)}
    made = names if axis is None else [f"{name}.rows" for name in names]
    recv = _instr("recv", (ids,), (*made, *(v.name for v in tally)), **attrs)
    if axis is None:
        return [recv]
    rows = zip(recv.outputs, names, strict=False)
    return [recv, *(_instr("all_reduce", (value,), (name,), axis=axis) for value, name in rows)]


def _sharing(value: Value, mesh: Mesh) -> str | None:
    """The axis whose ranks each transfer a part of the rows; None if each rank transfers its own rows."""
    return None if value.dims[0].axis == WHOLE or mesh.size(WHOLE) == 1 else WHOLE


def _instr(op: str, inputs: tuple[Value, ...], names: tuple[str, ...], **attrs: object) -> Instr:
    """An instruction whose outputs have these names. Names beyond the number of outputs are not used."""
    made = op_named(op).outputs(inputs, (), attrs)
    return Instr(op, inputs, tuple(Value(name, *of) for name, of in zip(names, made, strict=False)), (), attrs)

"""Groups the layers of a program that cost the same."""

from itertools import pairwise

from ckdist.program.program import Instr, Program

MIXERS = "attend", "attend_latent", "delta_rule"  # each layer has exactly one of these ops


def layers_of(program: Program) -> list[tuple[tuple[Instr, ...], int]]:
    """(instructions of a layer, number of such layers), in the order of their first layers.

    A layer is counted from after a mixer up to and including the next one. For a model with a single layer: all of its
    instructions.
    """
    attends = [i for i, instr in enumerate(program.instrs) if instr.op in MIXERS]
    if len(attends) < 2:
        return [(program.instrs, 1)]
    groups: dict[tuple[object, ...], tuple[tuple[Instr, ...], int]] = {}
    for begin, end in pairwise(attends):
        layer = program.instrs[begin + 1 : end + 1]
        shape = tuple((instr.op, tuple(v.dims for v in (*instr.inputs, *instr.outputs))) for instr in layer)
        first, count = groups.get(shape, (layer, 0))
        groups[shape] = first, count + 1
    return list(groups.values())

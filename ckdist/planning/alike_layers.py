"""Which layers of a program cost the same."""

from itertools import pairwise

from ckdist.program.program import Instr, Program

MIXERS = "attend", "attend_latent", "delta_rule"  # ops of which a layer has one


def layers_of(program: Program) -> list[tuple[tuple[Instr, ...], int]]:
    """The instructions from behind a layer's attention or linear attention to the next, which are one layer's, and how
    many layers are like that, in the order in which they come first; all of a model with a single layer.
    """
    attends = [i for i, instr in enumerate(program.instrs) if instr.op in MIXERS]
    if len(attends) < 2:
        return [(program.instrs, 1)]
    alike: dict[tuple[object, ...], tuple[tuple[Instr, ...], int]] = {}
    for begin, end in pairwise(attends):
        layer = program.instrs[begin + 1 : end + 1]
        shape = tuple((instr.op, tuple(v.dims for v in (*instr.inputs, *instr.outputs))) for instr in layer)
        first, count = alike.get(shape, (layer, 0))
        alike[shape] = first, count + 1
    return list(alike.values())

"""mix_blocks: attention residuals. A weighted sum of earlier blocks' residual streams and of the own one."""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.op import ServingLowering, lower, op, same, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.step import ABSENT, ValueIndex

MOST_BLOCKS = 64  # as in runtime/steps/mix_blocks.cpp


def infer_mix_blocks(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the operands, twice. Raises LayoutError if they do not fit together."""
    same("mix_blocks", *inputs)
    unsharded("mix_blocks", inputs[0])
    if attrs["added"] not in (1, 2) or len(inputs) > MOST_BLOCKS or any(w.dims != inputs[0].dims[1:] for w in weights):
        raise LayoutError(f"mix_blocks: {', '.join(map(str, weights))} do not fit {len(inputs)} of %{inputs[0].name}")
    return [(inputs[0].dims, None)] * 2


@op("mix_blocks", infer_mix_blocks)
def mix_blocks(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns (sum over i of p[i] * v[i], s). Kimi Team 2026, arXiv:2603.15031. It has no gradient.

    s: the sum of the `added` values and, if `streams`, of the one after them. v: the other operands, then s. p: the
    softmax of proj * norm * v[i] / rms(v[i]).
    """
    own = attrs["added"] + attrs["streams"]
    total = np.sum(inputs[:own], axis=0)
    values = np.stack([*inputs[own:], total])  # (blocks + 1, tokens, hidden)
    vector = np.prod(weights, axis=0)
    square = np.mean(values * values, axis=-1)
    scores = values @ vector / np.sqrt(square + np.float32(attrs["eps"]))
    p = np.exp(scores - scores.max(axis=0))
    return [np.einsum("bt,bth->th", p / p.sum(axis=0), values), total]


@lower("mix_blocks", "inference")
def lower_mix_blocks(lowering: ServingLowering, group: Group) -> None:
    """Emits one step."""
    instr, absent = group.instr, ValueIndex(ABSENT)
    own = instr.attrs["added"] + instr.attrs["streams"]
    places = [lowering.place_of(value) for value in instr.inputs]
    out, total = lowering.own_rows(*instr.outputs)
    lowering.emit(
        "mix_blocks",
        count=len(places) - own,
        blocks=places[own:],
        x=places[own - 1] if instr.attrs["streams"] else absent,
        y=places[0],
        z=places[1] if instr.attrs["added"] > 1 else absent,
        sum=total,
        out=out,
        norm=lowering.vector(instr.weights[0] if len(instr.weights) > 1 else None),
        proj=lowering.vector(instr.weight(-1)),
        eps=instr.attrs["eps"],
    )

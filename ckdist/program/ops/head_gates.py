"""gated_heads: `gated` with one gate for each head. The step that reads the result computes it."""

from dataclasses import replace

import numpy as np

from ckdist.program.ops.elementwise import gated
from ckdist.program.ops.op import op, unchanged_whole
from ckdist.program.ops.op_types import Arrays, Attrs, Inferred, Values, Weights
from ckdist.program.rank_context import RankContext


def infer_gated_heads(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the second operand. Raises LayoutError if the first has not one element for each of its heads."""
    gate, up = inputs
    has_heads = gate.dims[-1] == replace(up.dims[-1], width=1)
    return unchanged_whole("gated_heads")((replace(gate, dims=up.dims) if has_heads else gate, up), weights, attrs)


@op("gated_heads", infer_gated_heads)
def gated_heads(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(gate of the head) * up. It has no gradient: models with gated attention are served only."""
    gate, up = inputs
    return gated(context, [np.repeat(gate, up.shape[-1] // max(gate.shape[-1], 1), axis=-1), up], weights, attrs)

"""gated_heads: `gated` with one gate for each head. In serving the step that reads the result computes it."""

import numpy as np

from ckdist.program.ops.elementwise import gated, gated_vjp, lower_gated
from ckdist.program.ops.elementwise_grad import of_elements
from ckdist.program.ops.op import alike, lower, op, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Inferred, RankContext, Values, Weights


def infer_gated_heads(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the second operand. Raises LayoutError if the first has not one element for each of its heads."""
    return alike("gated_heads")(of_elements(inputs), weights, attrs)


@op("gated_heads", infer_gated_heads)
def gated_heads(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(gate of the head) * up."""
    gate, up = inputs
    return gated(context, [np.repeat(gate, up.shape[-1] // max(gate.shape[-1], 1), axis=-1), up], weights, attrs)


lower("gated_heads", "training")(lower_gated)
vjp("gated_heads")(gated_vjp)

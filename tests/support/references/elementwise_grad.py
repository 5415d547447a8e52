"""The definitions in numpy of the ops in `ckdist/program/ops/elementwise_grad.py`."""

import numpy as np

from ckdist.program.ops.elementwise import SWIGLU_ALPHA, SWIGLU_LIMIT
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.elementwise import GELU_CUBIC, GELU_SCALE


@reference("soft_cap_grad")
def soft_cap_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns dy * (1 - (y / cap)^2), with the result y of soft_cap."""
    y, dy = inputs
    return [dy * (1 - (y / np.float32(attrs["cap"])) ** 2)]


@reference("gated_grad")
def gated_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """d_gate = dy * up * f'(gate), d_up = dy * f(gate). clamped_swiglu has its own formula."""
    gate, up, dy = inputs
    if attrs["function"] == "silu":
        sigmoid = 1 / (1 + np.exp(-gate))
        return [dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid]
    if attrs["function"] == "clamped_swiglu":  # no gradient flows where an operand is clamped
        limit, alpha = np.float32(SWIGLU_LIMIT), np.float32(SWIGLU_ALPHA)
        g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
        sigmoid = 1 / (1 + np.exp(-alpha * g))
        slope = sigmoid * (1 + alpha * g * (1 - sigmoid))
        return [dy * (u + 1) * slope * (gate <= limit), dy * g * sigmoid * (np.abs(up) <= limit)]
    scale, cubic = np.float32(GELU_SCALE), np.float32(GELU_CUBIC)
    tanh = np.tanh(scale * (gate + cubic * gate**3))
    slope = 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh**2) * scale * (1 + 3 * cubic * gate**2)
    return [dy * up * slope, dy * 0.5 * gate * (1 + tanh)]


@reference("select_rows_grad")
def select_rows_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Puts each row at its token. Tokens whose logits are not needed get zeros."""
    (dy,) = inputs
    dx = np.zeros((len(context.positions), *dy.shape[1:]), dy.dtype)  # (tokens, n)
    np.add.at(dx, context.logits_indices, dy)
    return [dx]

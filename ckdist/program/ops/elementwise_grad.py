"""The gradient of gated."""

import numpy as np

from ckdist.program.ops.elementwise import GATES, GELU_CUBIC, GELU_SCALE, SWIGLU_ALPHA, SWIGLU_LIMIT, of_elements
from ckdist.program.ops.op import TrainingLowering, alike, lower, op
from ckdist.program.ops.op_types import Arrays, Attrs, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr


def infer_gated_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the first two operands. Raises LayoutError if the first is neither like the second nor its heads."""
    return [(inputs[0].dims, None), *alike("gated_grad")(of_elements(inputs), weights, attrs)]


@op("gated_grad", infer_gated_grad)
def gated_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """d_gate = dy * up * f'(gate), d_up = dy * f(gate). clamped_swiglu has its own formula.

    The gradient of a head's gate is the sum over its elements.
    """
    gate, up, dy = inputs
    if gate.shape != up.shape:
        wide = np.repeat(gate, up.shape[-1] // gate.shape[-1], axis=-1)
        d_gate, d_up = gated_grad(context, [wide, up, dy], weights, attrs)
        return [d_gate.reshape(*gate.shape, -1).sum(axis=-1), d_up]
    if attrs["function"] == "silu":
        sigmoid = 1 / (1 + np.exp(-gate))
        return [dy * up * sigmoid * (1 + gate * (1 - sigmoid)), dy * gate * sigmoid]
    if attrs["function"] in ("identity", "relu"):
        slope = (gate > 0).astype(dy.dtype) if attrs["function"] == "relu" else np.ones_like(dy)
        return [dy * up * slope, dy * gate * slope]
    if attrs["function"] in ("sigmoid", "softplus"):
        sigmoid = 1 / (1 + np.exp(-gate))
        is_sigmoid = attrs["function"] == "sigmoid"
        slope, value = (sigmoid * (1 - sigmoid), sigmoid) if is_sigmoid else (sigmoid, np.logaddexp(gate, 0))
        return [dy * up * slope, dy * value.astype(dy.dtype)]
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


@lower("gated_grad", "training")
def lower_gated_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step."""
    lowering.emit_rows("gated_grad", instr, "gate up dy", "d_gate d_up", function=GATES[instr.attrs["function"]])

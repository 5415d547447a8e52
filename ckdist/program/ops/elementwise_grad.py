"""The gradient of gated."""

import numpy as np

from ckdist.program.ops.elementwise import FUNCTIONS, GATES, GELU, SWIGLU_ALPHA, SWIGLU_LIMIT, of_elements
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
    if attrs["function"] == "clamped_swiglu":  # no gradient flows where an operand is clamped
        limit, alpha = np.float32(SWIGLU_LIMIT), np.float32(SWIGLU_ALPHA)
        g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
        sigmoid = 1 / (1 + np.exp(-alpha * g))
        slope = sigmoid * (1 + alpha * g * (1 - sigmoid))
        return [dy * (u + 1) * slope * (gate <= limit), dy * g * sigmoid * (np.abs(up) <= limit)]
    return [dy * up * _slope(gate, attrs["function"]), dy * FUNCTIONS[attrs["function"]](gate)]


def _slope(x: np.ndarray, function: str) -> np.ndarray:
    """f'(x)."""
    if function == "gelu_tanh":
        scale, cubic = map(np.float32, GELU)
        tanh = np.tanh(scale * (x + cubic * x**3))
        return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * scale * (1 + 3 * cubic * x**2)
    sigmoid = FUNCTIONS["sigmoid"](x)
    slopes = {"silu": sigmoid * (1 + x * (1 - sigmoid)), "sigmoid": sigmoid * (1 - sigmoid), "softplus": sigmoid}
    return {**slopes, "identity": np.ones_like(x), "relu": (x > 0).astype(x.dtype)}[function]


@lower("gated_grad", "training")
def lower_gated_grad(lowering: TrainingLowering, instr: Instr) -> None:
    lowering.emit_rows("gated_grad", instr, "gate up dy", "d_gate d_up", function=GATES[instr.attrs["function"]])

"""The gradients of soft_cap, gated and select_rows."""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.elementwise import GATES, GELU_CUBIC, GELU_SCALE, SWIGLU_ALPHA, SWIGLU_LIMIT
from ckdist.program.ops.op import TrainingLowering, alike, lower, op
from ckdist.program.ops.op_types import Arrays, Attrs, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr


@op("soft_cap_grad", alike("soft_cap_grad"))
def soft_cap_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns dy * (1 - (y / cap)^2), with the result y of soft_cap."""
    y, dy = inputs
    return [dy * (1 - (y / np.float32(attrs["cap"])) ** 2)]


def infer_gated_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the first two operands. Raises LayoutError if the first is neither like the second nor its heads."""
    return [(inputs[0].dims, None), *alike("gated_grad")(of_elements(inputs), weights, attrs)]


def of_elements(inputs: Values) -> Values:
    """Operands of a gate, with one for each element of the second in place of one for each head."""
    gate, *others = inputs
    by_head = gate.dims[-1] == replace(others[0].dims[-1], width=1)
    return (replace(gate, dims=others[0].dims) if by_head else gate, *others)


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
    gate, up, dy = map(lowering.place_of, instr.inputs)
    d_gate, d_up = map(lowering.output, instr.outputs)
    function = GATES[instr.attrs["function"]]
    lowering.emit("gated_grad", gate=gate, up=up, dy=dy, d_gate=d_gate, d_up=d_up, function=function)


def infer_select_rows_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The same dims, with tokens in place of outputs. Raises LayoutError if tokens are sharded."""
    if attrs["dim"].axis:
        dim = attrs["dim"]
        raise LayoutError(f"select_rows_grad needs all of {dim.name}, but it is sharded over {dim.axis}")
    return [((attrs["dim"], *inputs[0].dims[1:]), None)]


@op("select_rows_grad", infer_select_rows_grad)
def select_rows_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Puts each row at its token. Tokens whose logits are not needed get zeros."""
    (dy,) = inputs
    dx = np.zeros((len(context.positions), *dy.shape[1:]), dy.dtype)  # (tokens, n)
    np.add.at(dx, context.logits_indices, dy)
    return [dx]

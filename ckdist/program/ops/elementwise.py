"""Elementwise and rowwise ops."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.program.ops.op import ServingLowering, TrainingLowering, alike, lower, op, same, unchanged, vjp, whole
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value
from ckdist.program.step import ABSENT

GATES = native.numbers("ckdist_gate", "ckdist_gate_")
# sqrt(2 / pi) and the factor of the cube in the tanh form of GELU
GELU = 0.7978845608028654, 0.044715
LIMIT_PARTS = 16  # a limit of a gate is a multiple of 1 / LIMIT_PARTS
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # for clamped_swiglu, as in kernels/isa/gate.h


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "softplus": lambda x: np.logaddexp(x, np.float32(0)),
    "tanh": np.tanh,
    # Hendrycks & Gimpel 2016, arXiv:1606.08415, and its tanh form
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / np.sqrt(np.float32(2)))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.float32(GELU[0]) * (x + np.float32(GELU[1]) * x**3))),
}


@op("scale", unchanged, takes_partial=True)
def scale(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x * factor."""
    return [inputs[0] * np.float32(attrs["factor"])]


@lower("scale", "training")
def lower_scale(lowering: TrainingLowering, instr: Instr) -> None:
    lowering.emit_rows("scale", instr, "x", factor=instr.attrs["factor"])


@vjp("scale")
def scale_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """The gradient times the factor."""
    return [*g.emit("scale", (grads[0],), names=["d_scale"], factor=instr.attrs["factor"])]


@op("scale_queries", unchanged, takes_partial=True)
def scale_queries(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Multiplies each row by 1 + beta * log(1 + floor((position + from_one) / context))."""
    far = np.log1p(((context.positions + attrs["from_one"]) // attrs["context"]).astype(np.float32))
    return [inputs[0] * (1 + np.float32(attrs["beta"]) * far)[:, None]]


@lower("scale_queries", "training")
def lower_scale_queries(lowering: TrainingLowering, instr: Instr) -> None:
    lowering.emit_rows("scale_queries", instr, "x", **query_fields(instr))


@vjp("scale_queries")
def scale_queries_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """The gradient times the same factors."""
    return [*g.emit("scale_queries", (grads[0],), names=["d_scale"], **instr.attrs)]


def query_fields(instr: Instr | None) -> dict[str, float | int]:
    """The fields of a step that scales queries as `instr` says. None: it does not."""
    attrs = instr.attrs if instr else {"beta": 0.0, "context": ABSENT, "from_one": False}
    return {f"query_{name}": attrs[name] for name in ("beta", "context", "from_one")}


@op("soft_cap", unchanged)
def soft_cap(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns cap * tanh(x / cap). Gemma 2, arXiv:2408.00118, section 2."""
    cap = np.float32(attrs["cap"])
    return [cap * np.tanh(inputs[0] / cap)]


@op("activate", unchanged)
def activate(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(x). The step of the linear that makes x computes it."""
    return [FUNCTIONS[attrs["function"]](inputs[0])]


def gate_number(function: str, limit: float = 0.0) -> int:
    """The number of a gate's function and limit (0: none) in a step."""
    return GATES["limited_silu"] | round(limit * LIMIT_PARTS) << 8 if limit else GATES[function]


@op("gated", alike("gated"))
def gated(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(gate) * up, with f SiLU, GELU, GELU in its tanh form, sigmoid or softplus. Shazeer 2020, arXiv:2002.05202.

    With a `limit`: min(silu(gate), limit) * clamp(up, -limit, limit).
    situ: 4 tanh(g / 4) * sigmoid(g) * 25 tanh(u / 25). Kimi Team 2026, arXiv:2607.24653.
    clamped_swiglu: g * sigmoid(1.702 g) * (u + 1), with g = min(gate, 7) and u = clamp(up, -7, 7). OpenAI 2025,
    arXiv:2508.10925.
    """
    gate, up = inputs
    if attrs["function"] == "clamped_swiglu":
        g, u = np.minimum(gate, np.float32(SWIGLU_LIMIT)), np.clip(up, np.float32(-SWIGLU_LIMIT), SWIGLU_LIMIT)
        return [g / (1 + np.exp(np.float32(-SWIGLU_ALPHA) * g)) * (u + 1)]
    if attrs["function"] == "clamped_silu":  # limits of 10, as in kernels/isa/gate.h
        g = np.minimum(gate, np.float32(10))
        return [g / (1 + np.exp(-g)) * np.clip(up, np.float32(-10), np.float32(10))]
    if attrs["function"] == "situ":
        return [4 * np.tanh(gate / 4) * FUNCTIONS["sigmoid"](gate) * (25 * np.tanh(up / 25))]
    if limit := attrs.get("limit", 0.0):
        return [np.minimum(FUNCTIONS["silu"](gate), np.float32(limit)) * np.clip(up, -limit, limit).astype(up.dtype)]
    return [FUNCTIONS[attrs["function"]](gate * np.float32(attrs.get("gate_scale", 1.0))) * up]


@lower("gated", "training")
def lower_gated(lowering: TrainingLowering, instr: Instr) -> None:
    lowering.emit_rows("gated", instr, "gate up", function=GATES[instr.attrs["function"]])


@vjp("gated")
def gated_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for both gradients."""
    return list(
        g.emit("gated_grad", (*instr.inputs, grads[0]), names=["d_gate", "d_up"], function=instr.attrs["function"])
    )


def of_elements(inputs: Values) -> Values:
    """Operands of a gate, with one for each element of the second in place of one for each head."""
    gate, *others = inputs
    by_head = gate.dims[-1] == replace(others[0].dims[-1], width=1)
    return (replace(gate, dims=others[0].dims) if by_head else gate, *others)


def infer_gated_heads(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the second operand. Raises LayoutError if the first has not one element for each of its heads."""
    return alike("gated_heads")(of_elements(inputs), weights, attrs)


@op("gated_heads", infer_gated_heads)
def gated_heads(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(gate of the head) * up: one gate for each head. In serving the step that reads the result computes it."""
    gate, up = inputs
    return gated(context, [np.repeat(gate, up.shape[-1] // max(gate.shape[-1], 1), axis=-1), up], weights, attrs)


lower("gated_heads", "training")(lower_gated)
vjp("gated_heads")(gated_vjp)


def infer_add(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the operands. Raises LayoutError if they differ, or if only one is partial."""
    a, b = inputs
    same("add", a, b)
    if a.partial != b.partial:
        whole("add", a, b)
    return [(a.dims, a.partial)]


@op("add", infer_add, takes_partial=True)
def add(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum. If both operands are partial over an axis, so is the sum."""
    return [inputs[0] + inputs[1]]


@lower("add", "training")
def lower_add(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step. None for losses and gradients of weights, or if the step of one operand adds the other."""
    (out,) = instr.outputs
    if out.dims and out not in lowering.of_weight and not lowering.is_fused(instr):
        lowering.emit_rows("add", instr, "x y")


@vjp("add")
def add_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """The same gradient for both operands."""
    return [grads[0], grads[0]]


def infer_select_rows(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The same dims, with outputs in place of tokens. Raises LayoutError if the two are sharded over other axes."""
    tokens, outputs = inputs[0].dims[0], attrs["dim"]
    if tokens.axis != outputs.axis:
        raise LayoutError(
            f"select_rows: tokens are sharded over {tokens.axis}, outputs over {outputs.axis}; shard both or neither"
        )
    return [((attrs["dim"], *inputs[0].dims[1:]), None)]


@op("select_rows", infer_select_rows)
def select_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The rows whose logits are needed. If tokens are sharded, only those of this rank."""
    return [inputs[0][context.logits_indices]]


@lower("select_rows", "inference")
def lower_select_rows(lowering: ServingLowering, group: Group) -> None:
    """No step: the reader selects the rows."""
    lowering.stands_for(group.instr.outputs[0], group.instr.inputs[0])

"""Elementwise and rowwise ops: scale, scale_queries, soft_cap, activate, gated, add, select_rows."""

import math

import numpy as np

from ckdist import native
from ckdist.errors import LayoutError
from ckdist.program.ops.op import ServingLowering, TrainingLowering, alike, lower, op, same, unchanged, vjp, whole
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Group, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value
from ckdist.program.step import ABSENT

GATES = native.numbers("ckdist_gate", "ckdist_gate_")
# sqrt(2 / pi) and the factor of the cube in the tanh form of GELU
GELU_SCALE, GELU_CUBIC = 0.7978845608028654, 0.044715
LIMIT_PARTS = 16  # a limit of a gate is a multiple of 1 / LIMIT_PARTS
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # for clamped_swiglu, as in kernels/isa/gate.h


@op("scale", unchanged, takes_partial=True)
def scale(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x * factor."""
    return [inputs[0] * np.float32(attrs["factor"])]


@lower("scale", "training")
def lower_scale(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step."""
    (x,), (out,) = instr.inputs, instr.outputs
    lowering.emit("scale", x=lowering.place_of(x), out=lowering.output(out), factor=instr.attrs["factor"])


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
    """Emits one step."""
    x, out = lowering.place_of(instr.inputs[0]), lowering.output(instr.outputs[0])
    lowering.emit("scale_queries", x=x, out=out, **query_fields(instr))


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


@vjp("soft_cap")
def soft_cap_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction. It reads the result of soft_cap in place of x."""
    return [*g.emit("soft_cap_grad", (instr.outputs[0], grads[0]), names=["d_soft_cap"], cap=instr.attrs["cap"])]


@op("activate", unchanged)
def activate(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(x). The step of the linear that makes x computes it."""
    return [_function(inputs[0], attrs["function"])]


def _function(x: np.ndarray, name: str) -> np.ndarray:
    """ReLU (squared), SiLU, sigmoid, softplus, tanh, GELU or its tanh form (Hendrycks & Gimpel, arXiv:1606.08415)."""
    if name == "relu2":
        return np.maximum(x, 0) ** 2
    if name == "softplus":
        return np.logaddexp(x, np.float32(0))
    if name in ("tanh", "relu"):
        return np.tanh(x) if name == "tanh" else np.maximum(x, 0)
    if name == "identity":
        return x
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if name == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / np.sqrt(np.float32(2))))
    return 0.5 * x * (1 + np.tanh(np.float32(GELU_SCALE) * (x + np.float32(GELU_CUBIC) * x**3)))


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
        return [4 * np.tanh(gate / 4) * _function(gate, "sigmoid") * (25 * np.tanh(up / 25))]
    if limit := attrs.get("limit", 0.0):
        return [np.minimum(_function(gate, "silu"), np.float32(limit)) * np.clip(up, -limit, limit).astype(up.dtype)]
    return [_function(gate * np.float32(attrs.get("gate_scale", 1.0)), attrs["function"]) * up]


@lower("gated", "training")
def lower_gated(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step."""
    gate, up = map(lowering.place_of, instr.inputs)
    function = GATES[instr.attrs["function"]]
    lowering.emit("gated", gate=gate, up=up, out=lowering.output(instr.outputs[0]), function=function)


@vjp("gated")
def gated_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for both gradients."""
    return list(
        g.emit("gated_grad", (*instr.inputs, grads[0]), names=["d_gate", "d_up"], function=instr.attrs["function"])
    )


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
    if not out.dims or out in lowering.names.of_weight or lowering.is_fused(instr):
        return
    x, y = map(lowering.place_of, instr.inputs)
    lowering.emit("add", x=x, y=y, out=lowering.output(out))


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


@vjp("select_rows")
def select_rows_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """Puts each row of the gradient at its token."""
    return [*g.emit("select_rows_grad", (grads[0],), names=["d_select_rows"], dim=instr.inputs[0].dims[0])]

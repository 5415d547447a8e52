"""Causal depthwise convolutions over packed sequences, and their gradients, for training."""

from typing import Any

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.delta_rule import silu
from ckdist.program.ops.op import TrainingLowering, lower, op, same, summed_over, total, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value


def infer_convolve(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the kernel has other channels."""
    x, w = inputs[0].dims[-1], weights[0].dims[0]
    if (w.count, w.axis) != (x.count, x.axis) or w.width % x.width:
        raise LayoutError(f"convolve of [{x}] has a kernel of [{w}]: {weights[0]}")
    return [(inputs[0].dims, None)]


def _shifted(context: RankContext, rows: np.ndarray, by: int) -> np.ndarray:
    """Row t - by of the same sequence in place of row t; zeros if there is none."""
    out = np.zeros_like(rows)
    for s in context.sequences():
        own = rows[s]
        kept = max(len(own) - abs(by), 0)
        out[s][max(by, 0) : max(by, 0) + kept] = own[max(-by, 0) : max(-by, 0) + kept]
    return out


def _sums(context: RankContext, x: np.ndarray, weights: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """(results before the activation, the kernel by channel)."""
    kernel = weights[0].reshape(x.shape[1], -1)  # (channels, taps)
    taps = kernel.shape[1]
    made = total(_shifted(context, x, taps - 1 - i) * kernel[:, i] for i in range(taps))
    return (made + weights[1] if len(weights) > 1 else made), kernel


@op("convolve", infer_convolve)
def convolve(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(bias + sum over i of w[:, i] * x[t - taps + 1 + i]) within each sequence; f is SiLU if it `activates`."""
    made, _ = _sums(context, inputs[0], weights)
    return [silu(made) if attrs["activates"] else made]


@vjp("convolve")
def convolve_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for all gradients."""
    names = [f"d_{w.name}" for w in instr.weights if w] if any(wanted[1:]) else []
    more = {"weight_grads": len(names), "activates": instr.attrs["activates"]}
    found = g.emit("convolve_grad", (instr.inputs[0], grads[0]), instr.weights, ["d_x", *names], **more)
    return [*found, *([None] * (len(wanted) - len(found)))]


def infer_convolve_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x and of the weights whose gradients are wanted."""
    same("convolve_grad", *inputs)
    own = weights[: attrs["weight_grads"]]
    return [*infer_convolve(inputs, weights, attrs), *((w.dims, summed_over(inputs[0].dims[0])) for w in own)]


@op("convolve_grad", infer_convolve_grad)
def convolve_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With ds = dy * f'(s): dx[t] = sum over i of w[:, i] * ds[t + taps - 1 - i], dw[:, i] = sum over t of ds * x."""
    x, dy = inputs
    s, kernel = _sums(context, x, weights)
    sigmoid = 1 / (1 + np.exp(-s))
    ds = dy * sigmoid * (1 + s * (1 - sigmoid)) if attrs["activates"] else dy
    shifts = [kernel.shape[1] - 1 - i for i in range(kernel.shape[1])]
    dx = total(_shifted(context, ds, -by) * kernel[:, i] for i, by in enumerate(shifts))
    dw = np.stack([(ds * _shifted(context, x, by)).sum(axis=0) for by in shifts], axis=1)
    return [dx, *[dw.reshape(weights[0].shape), ds.sum(axis=0)][: attrs["weight_grads"]]]


def _fields(lowering: TrainingLowering, instr: Instr) -> dict[str, Any]:
    """The fields that both steps have."""
    kernel, *bias = (instr.weight(i) for i in range(len(instr.weights)))
    return {
        "x": lowering.place_of(instr.inputs[0]),
        "weight": lowering.parameter(kernel),
        "bias": lowering.parameter(bias[0] if bias else None),
        "taps": kernel.dims[0].width // instr.inputs[0].dims[-1].width,
        "activates": instr.attrs["activates"],
    }


@lower("convolve", "training")
def lower_convolve(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step."""
    lowering.emit("convolve", **_fields(lowering, instr), out=lowering.output(instr.outputs[0]))


@lower("convolve_grad", "training")
def lower_convolve_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step, which also adds to the gradients of the weights."""
    dx, d_weight, d_bias, *_ = *instr.outputs, None, None
    fields = {"weight_gradient": lowering.added(d_weight), "bias_gradient": lowering.added(d_bias)}
    dy = lowering.place_of(instr.inputs[1])
    lowering.emit("convolve_grad", **_fields(lowering, instr), **fields, dy=dy, dx=lowering.output(dx))

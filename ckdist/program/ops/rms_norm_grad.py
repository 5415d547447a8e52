"""The gradients of rms_norm."""

import numpy as np

from ckdist.program.ops.op import TrainingLowering, lower, op, same, summed_over
from ckdist.program.ops.op_types import Arrays, Attrs, Inferred, RankContext, Values, Weights
from ckdist.program.ops.rms_norm import infer_rms_norm, inverse_rms
from ckdist.program.program import Instr


def infer_rms_norm_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x, and those of the weight if its gradient is wanted."""
    (x, dy), (w,) = inputs, weights
    same("rms_norm_grad", x, dy)
    outputs = infer_rms_norm(inputs, weights, attrs)
    return [*outputs, (w.dims, summed_over(*x.dims))] if attrs["weight_grad"] else outputs


@op("rms_norm_grad", infer_rms_norm_grad)
def rms_norm_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With r = 1 / rms(x) and n = x * r: dx = r * (dy * w - n * mean(dy * w * n)) and dw = sum over rows of dy * n.

    dw only with `weight_grad`.
    """
    (x, dy), (w,) = inputs, weights
    rows, dy_rows = x.reshape(-1, w.shape[-1]), dy.reshape(-1, w.shape[-1])  # (tokens * groups, n)
    r = inverse_rms(rows, attrs["eps"])
    n, dn = rows * r, dy_rows * w
    dx = (r * (dn - n * np.mean(dn * n, axis=-1, keepdims=True))).reshape(x.shape)
    return [dx, (dy_rows * n).sum(axis=0)] if attrs["weight_grad"] else [dx]


@lower("rms_norm_grad", "training")
def lower_rms_norm_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step, which also adds to the gradient of the weight."""
    lower_norm_grad(lowering, instr, instr.inputs[0].dims[-1].local(lowering.mesh))


def lower_norm_grad(lowering: TrainingLowering, instr: Instr, normed: int) -> None:
    """Emits the step for the gradient of a norm over the first `normed` elements of a row."""
    (x, dy), w = map(lowering.place_of, instr.inputs), instr.weight(0)
    dx, d_weight, *_ = *instr.outputs, None
    lowering.emit(
        "rms_norm_grad",
        x=x,
        dy=dy,
        residual=lowering.residual(dx),
        dx=lowering.output(dx),
        weight=lowering.parameter(w),
        weight_grad=lowering.added(d_weight),
        size=w.dims[0].elements // instr.attrs.get("groups", 1),
        groups=instr.attrs.get("groups", 1),
        normed=normed,
        eps=instr.attrs["eps"],
    )


def infer_group_norm_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x, and those of the weight if its gradient is wanted."""
    same("group_norm_grad", *inputs)
    of_weight = [(weights[0].dims, summed_over(inputs[0].dims[0]))] if attrs["weight_grad"] else []
    return [(inputs[0].dims, None), *of_weight]


@op("group_norm_grad", infer_group_norm_grad)
def group_norm_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """`rms_norm_grad` of each group, which has a part of the weight."""
    parts = [np.split(x, attrs["groups"], axis=-1) for x in (*inputs, *weights)]
    found = [rms_norm_grad(context, [x, dy], [w], attrs) for x, dy, w in zip(*parts, strict=True)]
    return [np.concatenate(of_groups, axis=-1) for of_groups in zip(*found, strict=True)]


lower("group_norm_grad", "training")(lower_rms_norm_grad)

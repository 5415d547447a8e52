"""DoRA (Liu et al. 2024, arXiv:2402.09353): a result is scaled by magnitude / norm of its row of W + scale B A.

As in the paper's section 4.3, the norms are constants for the gradient.
"""

from collections.abc import Sequence

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.collectives import in_groups
from ckdist.program.ops.op import TrainingLowering, lower, op, same, total, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value


def infer_row_norms(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """One number per row of the matrix."""
    return [((weights[0].dims[0],), None)]


@op("row_norms", infer_row_norms, collective=True)
def row_norms(contexts: Sequence[RankContext], inputs: list[Arrays], attrs: Attrs) -> list[Arrays]:
    """The norms of the rows of w + scale * b @ a, (rows,). Ranks that shard the columns add their squares."""
    axis, scale = attrs["weights"][0].dims[1].axis, np.float32(attrs["scale"])
    squares = [[np.square(w + scale * (b @ a)).sum(axis=1)] for w, a, b in attrs["arrays"]]
    squares = in_groups(contexts, squares, axis, total) if axis else squares
    return [[np.sqrt(own)] for (own,) in squares]


@lower("row_norms", "training")
def lower_row_norms(lowering: TrainingLowering, instr: Instr) -> None:
    w, a, b = (instr.weight(at) for at in range(3))
    lowering.emit(
        "row_norms",
        **{name: lowering.parameter(weight) for name, weight in (("weight", w), ("a", a), ("b", b))},
        out=lowering.output(instr.outputs[0]),
        scale=instr.attrs["scale"],
        summed=w.dims[1].axis is not None,
    )


def infer_magnitude(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the first value. Raises LayoutError if the norms do not fit."""
    *values, norms = inputs
    same("magnitude", *values)
    if norms.dims != values[0].dims[1:]:
        raise LayoutError(f"magnitude: %{values[0].name} and the norms %{norms.name} differ in their columns")
    return [(values[0].dims, None)]


@op("magnitude", infer_magnitude)
def magnitude(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns the product of the values * magnitude / norms + bias. Either weight may be absent."""
    *values, norms = inputs
    (m, bias), has = weights, [weight is not None for weight in attrs["weights"]]
    y = values[0] if len(values) == 1 else values[0] * values[1]
    y = y * ((m if has[0] else 1) / norms)
    return [y + bias if has[1] else y]


@vjp("magnitude")
def magnitude_vjp(g: Emitter, instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """The gradients of the value and of the magnitude. Raises LayoutError if the bias is trained."""
    x, norms = instr.inputs
    m, dy = instr.weight(0), grads[0]
    if dy is None or wanted[3]:
        raise LayoutError("magnitude has no gradient of a bias")
    results: list[Value | None] = [None] * 4  # of x, norms, the magnitude, the bias
    if wanted[0]:
        (results[0],) = g.emit("magnitude", (dy, norms), (m, None), ["d_magnitude"])
    if wanted[2]:
        (product,) = g.emit("magnitude", (dy, x, norms), (None, None), ["d_scaled"])
        (results[2],) = g.emit("bias_grad", (product,), names=[f"d_{m.name}"])
    return results


@lower("magnitude", "training")
def lower_magnitude(lowering: TrainingLowering, instr: Instr) -> None:
    x, *by, norms = instr.inputs
    m, bias = instr.weights
    lowering.emit(
        "magnitude",
        x=lowering.place_of(x),
        by=lowering.place_of(by[0] if by else None),
        norms=lowering.place_of(norms),
        magnitude=lowering.parameter(m),
        bias=lowering.parameter(bias),
        out=lowering.output(instr.outputs[0]),
    )

"""rms_norm over rows or heads."""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.op import TrainingLowering, lower, op, unsharded, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value


def infer_rms_norm(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the weight has another size."""
    x, w = inputs[0], weights[0]
    elements = x.dims[-1].elements if weights == (None,) else w.dims[-1].elements
    if elements != x.dims[-1].width:  # not a norm per head
        unsharded("rms_norm", x)
        if elements != x.dims[-1].elements:
            raise LayoutError(f"rms_norm of {x.dims[-1].elements} elements has a weight of {elements}: {w}")
    return [(x.dims, None)]


@op("rms_norm", infer_rms_norm)
def rms_norm(context: RankContext, inputs: Arrays, weights: list[np.ndarray | None], attrs: Attrs) -> Arrays:
    """Returns x / sqrt(mean(x^2) + eps) * w, over the last dimension or per head. Zhang & Sennrich 2019,
    arXiv:1910.07467.
    """
    (x,), (w,) = inputs, weights
    rows = x.reshape(-1, x.shape[-1] if w is None else w.shape[-1])  # (tokens * groups, n)
    return [(rows * inverse_rms(rows, attrs["eps"]) * (1 if w is None else w)).reshape(x.shape)]


def inverse_rms(rows: np.ndarray, eps: float) -> np.ndarray:
    """1 / sqrt(mean(row^2) + eps): (rows, n) -> (rows, 1)."""
    return 1 / np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + np.float32(eps))


@lower("rms_norm", "training")
def lower_rms_norm(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step."""
    (x,), w = map(lowering.place_of, instr.inputs), instr.weight(0)
    out, groups = lowering.output(instr.outputs[0]), instr.attrs.get("groups", 1)  # of the op group_norm
    width, size = lowering.buffers[out].width, w.dims[0].elements // groups
    fields = {"size": size, "normed": width, "groups": groups, "eps": instr.attrs["eps"]}
    lowering.emit("rms_norm", x=x, out=out, weight=lowering.parameter(w), **fields)


@vjp("rms_norm")
def rms_norm_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of x and of the weight."""
    w, names = instr.weight(0), ["d_norm"]
    if wanted[1]:
        names.append(f"d_{w.name}")
    dx, *dw = g.emit(
        "rms_norm_grad", (instr.inputs[0], grads[0]), (w,), names, eps=instr.attrs["eps"], weight_grad=wanted[1]
    )
    return [dx, *(dw or [None])]

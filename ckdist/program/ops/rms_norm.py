"""rms_norm over rows or heads, and layer_norm, which the step of its reader computes."""

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
    lower_norm(lowering, instr, instr.inputs[0].dims[-1].local(lowering.mesh))


def lower_norm(lowering: TrainingLowering, instr: Instr, normed: int) -> None:
    """Emits the step of a norm over the first `normed` elements of a row."""
    w, groups = instr.weight(0), instr.attrs.get("groups", 1)  # of the op group_norm
    fields = {"size": w.dims[0].elements // groups, "normed": normed, "groups": groups, "eps": instr.attrs["eps"]}
    lowering.emit_rows("rms_norm", instr, "x", weight=lowering.parameter(w), **fields)


@vjp("rms_norm")
def rms_norm_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of x and of the weight."""
    return norm_gradients(g, instr, grads[0], wanted[1], "d_norm")


def norm_gradients(g: Emitter, instr: Instr, dy: Value, of_weight: bool, name: str) -> Gradients:
    """Emits the gradient of a norm: of x, and `of_weight`."""
    names, attrs = [name, f"d_{instr.weight(0).name}"], {**instr.attrs, "weight_grad": of_weight}
    operands = (*instr.inputs, dy), instr.weights
    dx, *dw = g.emit(f"{instr.op}_grad", *operands, names[: 1 + of_weight], **attrs)
    return [dx, *(dw or [None])]


def infer_layer_norm(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the weight has another size."""
    x, w = inputs[0], weights[0]
    unsharded("layer_norm", x)
    if w.dims[-1].elements != x.dims[-1].elements:
        raise LayoutError(f"layer_norm of {x.dims[-1].elements} elements has a weight of {w.dims[-1].elements}: {w}")
    return [(x.dims, None)]


@op("layer_norm", infer_layer_norm)
def layer_norm(
    context: RankContext, inputs: list[np.ndarray], weights: list[np.ndarray | None], attrs: Attrs
) -> list[np.ndarray]:
    """(x - mean(x)) / sqrt(var(x) + eps) * w (+ b). Ba et al. 2016, arXiv:1607.06450."""
    (x,), (w, bias) = inputs, weights
    assert w is not None  # only the bias is optional
    centred = x - x.mean(axis=-1, keepdims=True)
    y = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + np.float32(attrs["eps"])) * w
    return [y if bias is None else y + bias]

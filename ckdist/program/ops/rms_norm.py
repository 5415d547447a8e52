"""rms_norm over rows or heads, its gradient, and the norm over all heads of a token if ranks share the heads."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.op import lower, op, same, summed_over, unsharded, vjp, whole
from ckdist.program.ops.op_types import Arrays, Attrs, Gradients, Inferred, Values, Weights
from ckdist.program.program import Instr, Value
from ckdist.program.rank_context import RankContext
from ckdist.program.step import ABSENT, GradientIndex

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.emitter import Emitter
    from ckdist.program.fusion import Group
    from ckdist.program.lower import ServingLowering
    from ckdist.program.lower_training import TrainingLowering


def infer_rms_norm(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the weight has another size."""
    x, (w,) = inputs[0], weights
    whole("rms_norm", *inputs)
    if w.dims[-1].elements != x.dims[-1].width:  # not a norm per head
        unsharded("rms_norm", x)
        if w.dims[-1].elements != x.dims[-1].elements:
            raise LayoutError(f"rms_norm of {x.dims[-1].elements} elements has a weight of {w.dims[-1].elements}: {w}")
    return [(x.dims, None)]


@op("rms_norm", infer_rms_norm)
def rms_norm(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x / sqrt(mean(x^2) + eps) * w, over the last dimension or per head. Zhang & Sennrich 2019,
    arXiv:1910.07467.
    """
    (x,), (w,) = inputs, weights
    rows = x.reshape(-1, w.shape[-1])  # (tokens * groups, n)
    return [(rows * inverse_rms(rows, attrs["eps"]) * w).reshape(x.shape)]


def inverse_rms(rows: np.ndarray, eps: float) -> np.ndarray:
    """1 / sqrt(mean(row^2) + eps): (rows, n) -> (rows, 1)."""
    return 1 / np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + np.float32(eps))


@lower("rms_norm", "training")
def lower_rms_norm(lowering: "TrainingLowering", instr: Instr) -> None:
    """Emits one step."""
    (x,), w = map(lowering.place_of, instr.inputs), instr.weight(0)
    out, size = lowering.output(instr.outputs[0]), w.dims[0].elements
    fields = {"size": size, "normed": lowering.buffers[out].width, "eps": instr.attrs["eps"]}
    lowering.emit("rms_norm", x=x, out=out, weight=lowering.parameter(w), **fields)


@vjp("rms_norm")
def rms_norm_vjp(g: "Emitter", instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of x and of the weight."""
    w, names = instr.weight(0), ["d_norm"]
    if wanted[1]:
        names.append(f"d_{w.name}")
    dx, *dw = g.emit(
        "rms_norm_grad", (instr.inputs[0], grads[0]), (w,), names, eps=instr.attrs["eps"], weight_grad=wanted[1]
    )
    return [dx, *(dw or [None])]


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
def lower_rms_norm_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """Emits one step, which also adds to the gradient of the weight."""
    lower_norm_grad(lowering, instr, lowering.buffers[lowering.place_of(instr.inputs[0])].width)


def lower_norm_grad(lowering: "TrainingLowering", instr: Instr, normed: int) -> None:
    """Emits the step for the gradient of a norm over the first `normed` elements of a row."""
    (x, dy), w = map(lowering.place_of, instr.inputs), instr.weight(0)
    gradient = GradientIndex(ABSENT)
    for d_weight in instr.outputs[1:]:
        lowering.is_fresh(d_weight)
        gradient = lowering.gradient(d_weight)
    lowering.emit(
        "rms_norm_grad",
        x=x,
        dy=dy,
        residual=lowering.residual(instr.outputs[0]),
        dx=lowering.output(instr.outputs[0]),
        weight=lowering.parameter(w),
        weight_grad=gradient,
        size=w.dims[0].elements,
        normed=normed,
        eps=instr.attrs["eps"],
    )


def infer_sum_squares(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """One number for each head of queries, then of keys. Partial if heads are sharded."""
    q, k = inputs
    whole("sum_squares", *inputs)
    heads, keys = q.dims[-1], k.dims[-1]
    return [((q.dims[0], Dim("squares", heads.count + keys.count)), heads.axis)]


@op("sum_squares", infer_sum_squares)
def sum_squares(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum of squares of each head. 0 for heads of other ranks, and for a kv-head that a lower rank has too."""
    q_dim, k_dim = (value.dims[-1] for value in attrs["inputs"])
    (begin, end), (first, _) = context.share(q_dim), context.share(k_dim)
    out = np.zeros((len(inputs[0]), q_dim.count + k_dim.count), inputs[0].dtype)
    out[:, begin:end] = (inputs[0] ** 2).reshape(len(out), end - begin, q_dim.width).sum(axis=-1)
    keys = (inputs[1] ** 2).reshape(len(out), -1, k_dim.width).sum(axis=-1)
    group = q_dim.count // k_dim.count
    for h in range(keys.shape[1]):
        if (first + h) * group >= begin:
            out[:, q_dim.count + first + h] = keys[:, h]
    return [out]


@lower("sum_squares", "inference")
def lower_sum_squares(lowering: "ServingLowering", group: "Group") -> None:
    """Emits one step. If queries, keys and values are exchanged, its sums follow them in the same row."""
    q, k = map(lowering.place_of, group.instr.inputs)
    (squares,), keys = group.instr.outputs, group.instr.inputs[1].dims[-1]
    count, source = squares.dims[-1].count, lowering.buffers[q]
    behind = replace(source, lead=source.width - count)
    (out,) = [lowering.buffer(**vars(behind))] if source.place == "slot" else lowering.results([squares])
    instrs = lowering.program.instrs
    attend = next(i for i in instrs[instrs.index(group.instr) :] if i.op == "attend")
    lowering.emit("sum_squares", q=q, k=k, out=out, layer=attend.attrs["layer"])
    lowering.key_places = ()
    if source.place == "slot":  # a view of the slot, for attention
        heads = [e // keys.width for begin, end in lowering.pieces(keys) for e in range(begin, end, keys.width)]
        lowering.key_places = tuple(map(heads.index, range(keys.count)))
        out = lowering.buffer(**vars(replace(behind, place="tokens")))
    lowering.at[squares.name] = out


def infer_rms_norm_heads(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of queries and keys. Raises LayoutError if a weight has another size."""
    q, k, squares = inputs
    whole("rms_norm_heads", *inputs)
    for x, w in zip((q, k), weights, strict=True):
        if w.dims[-1] != x.dims[-1]:
            raise LayoutError(f"rms_norm_heads of [{x.dims[-1]}] has a weight of [{w.dims[-1]}]: {w}")
    if squares.dims[-1].count != q.dims[-1].count + k.dims[-1].count:
        raise LayoutError(f"rms_norm_heads needs a square for each head, and %{squares.name} has {squares.dims[-1]}")
    return [(q.dims, None), (k.dims, None)]


@op("rms_norm_heads", infer_rms_norm_heads)
def rms_norm_heads(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x / sqrt(mean(x^2) + eps) * w over all heads of a token, for queries and keys. The sums of squares are
    given.
    """
    *parts, squares = inputs
    dims = [value.dims[-1] for value in attrs["inputs"][:2]]
    results, at = [], 0
    for x, w, dim in zip(parts, weights, dims, strict=True):
        mean = squares[:, at : at + dim.count].sum(axis=-1, keepdims=True) / dim.elements
        results.append(x / np.sqrt(mean + np.float32(attrs["eps"])) * w)
        at += dim.count
    return results


@lower("rms_norm_heads", "inference")
def lower_rms_norm_heads(lowering: "ServingLowering", group: "Group") -> None:
    """No step: the step of attention computes the norm."""
    for x, y in zip(group.instr.inputs, group.instr.outputs, strict=False):
        lowering.stands_for(y, x)

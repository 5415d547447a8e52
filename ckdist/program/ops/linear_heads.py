"""linear_heads, a matrix for each head, and its gradients: what absorbs a latent attention's projections."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ckdist.errors import ConfigError, LayoutError
from ckdist.program.lowered import MatrixKey
from ckdist.program.ops.op import Arrays, Attrs, Gradients, Inferred, Values, Weights, lower, op, vjp, whole
from ckdist.program.program import Instr, Value
from ckdist.program.rank_context import RankContext

if TYPE_CHECKING:  # which import the ops
    from ckdist.program.emitter import Emitter
    from ckdist.program.fusion import Group
    from ckdist.program.lower import Lowering
    from ckdist.program.lower_training import TrainingLowering


def infer_linear_heads(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The heads of x, each as wide as its matrix's rows and what of x is behind its columns.

    LayoutError where they do not fit together.
    """
    (x,), (w,) = inputs, weights
    whole("linear_heads", x)
    heads, (rows, columns) = x.dims[-1], w.dims
    if replace(heads, width=rows.width) != rows or heads.width < columns.elements or columns.axis:
        raise LayoutError(f"linear_heads: %{x.name} ends in [{heads}], {w} is [{rows}, {columns}]")
    return [((*x.dims[:-1], replace(heads, width=rows.width + heads.width - columns.elements)), None)]


@op("linear_heads", infer_linear_heads)
def linear_heads(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Of each head its first elements times the head's matrix, and behind that the others as they are.

    x: (tokens, heads * width), w: (heads * rows, columns) -> (tokens, heads * (rows + width - columns)).
    """
    x, w = split_heads(inputs[0], weights[0], attrs)
    y = np.einsum("thc,hrc->thr", x[..., : w.shape[2]], w)  # (tokens, heads, rows)
    return [np.concatenate([y, x[..., w.shape[2] :]], axis=-1).reshape(len(x), -1)]


def split_heads(x: np.ndarray, w: np.ndarray, attrs: Attrs) -> tuple[np.ndarray, np.ndarray]:
    """X as (tokens, heads, width), w as (heads, rows, columns)."""
    width, (rows, columns) = attrs["inputs"][0].dims[-1].width, attrs["weights"][0].dims
    heads = x.shape[1] // width
    return x.reshape(len(x), heads, width), w.reshape(heads, rows.width, columns.elements)


@lower("linear_heads", "inference")
def lower_linear_heads(lowering: "Lowering", group: "Group") -> None:
    """One step, which quantizes what it multiplies; a matrix for each of this rank's heads."""
    (x,), (out,), w = group.instr.inputs, group.instr.outputs, group.instr.weight(0)
    rows, columns = w.dims
    begin, end = rows.share(lowering.mesh)
    width = out.dims[-1].local(lowering.mesh)
    reader = lowering.graph.reader(out)
    if reader is not None and reader.op == "all_to_all":
        most = max(out.dims[-1].local(mesh) for mesh in lowering.peers)
        place = lowering.slot(width, lowering.max_tokens, most)
        lowering.next_slot()
    else:
        place = lowering.buffer("arena", width)
    lowering.at[out.name] = place
    span = lambda head: (head * rows.width, (head + 1) * rows.width)
    keys = [MatrixKey(w.name, span(head), (0, columns.elements)) for head in range(begin, end)]
    lowering.emit(
        "linear_heads",
        x=lowering.place_of(x),
        out=place,
        weight=lowering.matrix(keys),
        x_width=x.dims[-1].width,
        columns=columns.elements,
        head_rows=rows.width,
        format=lowering.formats(w.name),
    )


@lower("linear_heads", "training")
def refuse_training(lowering: "TrainingLowering", instr: Instr) -> None:
    """ConfigError: there are gradients, but no steps."""
    raise ConfigError("models with latent attention cannot be trained yet: their gradients have no native steps")


@vjp("linear_heads")
def linear_heads_vjp(g: "Emitter", instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """At most two instructions, for the gradients of x and of the matrices."""
    results: Gradients = [None, None]
    w, attrs = instr.weight(0), {"width": instr.inputs[0].dims[-1].width}
    if wanted[1]:
        results[1] = g.emit("linear_heads_weight_grad", (instr.inputs[0], grads[0]), (w,), [f"d_{w.name}"])[0]
    if wanted[0]:
        results[0] = g.emit("linear_heads_grad", (grads[0],), (w,), ["d_heads"], **attrs)[0]
    return results


def infer_linear_heads_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As x. LayoutError where the gradient does not fit the matrices."""
    (dy,), (w,) = inputs, weights
    whole("linear_heads_grad", dy)
    heads, (rows, columns) = dy.dims[-1], w.dims
    if heads.width != rows.width + attrs["width"] - columns.elements or replace(heads, width=rows.width) != rows:
        raise LayoutError(f"linear_heads_grad: %{dy.name} ends in [{heads}], {w} is [{rows}, {columns}]")
    return [((*dy.dims[:-1], replace(heads, width=attrs["width"])), None)]


@op("linear_heads_grad", infer_linear_heads_grad)
def linear_heads_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Of each head dy's first elements times the matrix, and behind that the others."""
    dy, w = split_heads(inputs[0], weights[0], attrs)
    dx = np.einsum("thr,hrc->thc", dy[..., : w.shape[1]], w)
    return [np.concatenate([dx, dy[..., w.shape[1] :]], axis=-1).reshape(len(dy), -1)]


def infer_linear_heads_weight_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As the matrices, partial where tokens are sharded."""
    whole("linear_heads_weight_grad", *inputs)
    return [(weights[0].dims, inputs[0].dims[0].axis)]


@op("linear_heads_weight_grad", infer_linear_heads_weight_grad)
def linear_heads_weight_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Of each head dy.T @ x, over the elements that its matrix has."""
    x, w = split_heads(inputs[0], weights[0], attrs)
    dy = inputs[1].reshape(*x.shape[:2], -1)
    return [np.einsum("thr,thc->hrc", dy[..., : w.shape[1]], x[..., : w.shape[2]]).reshape(weights[0].shape)]

"""linear_heads, a linear with one matrix per head: the absorbed projections of latent attention."""

from dataclasses import replace

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.lowered import MatrixKey
from ckdist.program.ops.op import ServingLowering, lower, op
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights


def infer_linear_heads(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """Heads of width rows + width - columns. Raises LayoutError if x and the matrices do not fit together."""
    (x,), (w,) = inputs, weights
    heads, (rows, columns) = x.dims[-1], w.dims
    if replace(heads, width=rows.width) != rows or heads.width < columns.elements or columns.axis:
        raise LayoutError(f"linear_heads: %{x.name} ends in [{heads}], {w} is [{rows}, {columns}]")
    return [((*x.dims[:-1], replace(heads, width=rows.width + heads.width - columns.elements)), None)]


@op("linear_heads", infer_linear_heads)
def linear_heads(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Per head: [w_head @ x[:columns], x[columns:]].

    x: (tokens, heads * width), w: (heads * rows, columns) -> (tokens, heads * (rows + width - columns)).
    """
    width, (rows, columns) = attrs["inputs"][0].dims[-1].width, attrs["weights"][0].dims
    x = inputs[0].reshape(len(inputs[0]), -1, width)
    w = weights[0].reshape(-1, rows.width, columns.elements)
    y = np.einsum("thc,hrc->thr", x[..., : columns.elements], w)  # (tokens, heads, rows)
    return [np.concatenate([y, x[..., columns.elements :]], axis=-1).reshape(len(x), -1)]


@lower("linear_heads", "inference")
def lower_linear_heads(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, which also quantizes its input. It has one matrix for each head of this rank."""
    (x,), (out,), w = group.instr.inputs, group.instr.outputs, group.instr.weight(0)
    rows, columns = w.dims
    begin, end = rows.share(lowering.mesh)
    place, _ = lowering.head_results(out)
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

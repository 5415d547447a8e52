"""layer_inputs (per-layer embeddings), scale_by (a layer's factor) and sum_rows (a sum that several steps read)."""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.lowered import MatrixKey
from ckdist.program.ops.op import ServingLowering, lower, op, same, unchanged, unsharded
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights
from ckdist.program.ops.rms_norm import inverse_rms
from ckdist.program.step import ABSENT, MatrixIndex, Span, VectorIndex


def infer_layer_inputs(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(tokens, width) for each layer. Raises LayoutError if x, the table and the norm do not fit together."""
    (_, x), (table, norm) = inputs, weights
    unsharded("layer_inputs", x)
    columns = table.dims[1]
    if x.dims[-1] != columns or norm.dims[0].elements != columns.width or table.dims[0].axis:
        raise LayoutError(f"layer_inputs: %{x.name} [{x.dims[-1]}], {table} and {norm} do not fit together")
    return [((x.dims[0], Dim("layer_input", columns.width)), None)] * columns.count


@op("layer_inputs", infer_layer_inputs)
def layer_inputs(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """(rms_norm(x * x_factor) + row * row_factor) * factor for each layer, with the table's row of each token."""
    (ids, x), (table, norm) = inputs, weights
    factor = {name: np.float32(attrs[name]) for name in ("x_factor", "row_factor", "factor")}
    rows = table[np.where((ids >= 0) & (ids < len(table)), ids, 0)].reshape(-1, len(norm))  # (tokens * layers, width)
    parts = x.reshape(rows.shape) * factor["x_factor"]
    parts = (parts * inverse_rms(parts, attrs["eps"]) * norm + rows * factor["row_factor"]) * factor["factor"]
    return list(parts.reshape(len(x), -1, len(norm)).transpose(1, 0, 2))


@lower("layer_inputs", "inference")
def lower_layer_inputs(lowering: ServingLowering, group: Group) -> None:
    """Emits one step. The table is read in its file. Raises LayoutError if hosts share rows out."""
    if lowering.host_rows:
        raise LayoutError("layer_inputs makes all rows on each host: use --experts tensor")
    instr = group.instr
    table, norm = instr.weight(0), instr.weight(1)
    places = lowering.own_rows(*instr.outputs)
    key = MatrixKey(table.name, *((0, dim.elements) for dim in table.dims))
    lowering.emit(
        "layer_inputs",
        x=lowering.place_of(instr.inputs[1]),
        norm=lowering.vector(norm),
        out=Span(places[0], len(places)),
        table=MatrixIndex(lowering.matrix([key]).first),
        **instr.attrs,
    )


@op("scale_by", unchanged)
def scale_by(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x * w, with a weight of one element. The step that reads the sum computes it."""
    return [inputs[0] * weights[0]]


def infer_sum_rows(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of y."""
    same("sum_rows", *inputs)
    unsharded("sum_rows", inputs[0])
    return [(inputs[0].dims, None)]


@op("sum_rows", infer_sum_rows)
def sum_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """(rms_norm(y) (+ x)) * factor."""
    y, *x = inputs
    total = y * inverse_rms(y, attrs["eps"]) * weights[0] + (x[0] if x else np.float32(0))
    return [total * np.float32(attrs.get("factor", 1.0))]


@lower("sum_rows", "inference")
def lower_sum_rows(lowering: ServingLowering, group: Group) -> None:
    """Emits one step with a barrier: unlike those of norm_quantize, its rows may be read by the next step."""
    y, *x = group.instr.inputs
    (total,) = group.instr.outputs
    source = lowering.place_of(y)
    by_host = source in lowering.of_hosts
    out = lowering.buffer("arena", y.dims[-1].elements, rows=lowering.most_rows(total), selected=total.selected)
    lowering.at[total.name] = out
    if by_host:
        lowering.of_hosts.add(out)
    lowering.emit(
        "sum_rows",
        "host" if by_host else total.rows,
        x=lowering.place_of(x[0] if x else None),
        y=source,
        post_norm=lowering.vector(group.instr.weight(0)),
        scalar=VectorIndex(ABSENT),
        out=out,
        post_eps=group.instr.attrs["eps"],
        post_factor=1.0,
        factor=group.instr.attrs.get("factor", 1.0),
    )

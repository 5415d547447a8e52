"""column_sums and cut_rows: rows cut at some standard deviations above their mean over the columns of all ranks."""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import FFN_UNIT, Dim
from ckdist.program.ops.op import ServingLowering, lower, op
from ckdist.program.ops.op_types import Arrays, Attrs, Group, Inferred, RankContext, Values, Weights


def _blocks(columns: int) -> int:
    """Blocks of columns that ranks do not divide. A sum over blocks is the same however they are sharded."""
    return -(-columns // FFN_UNIT)


def infer_column_sums(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """Two numbers for each block of columns. Partial if columns are sharded."""
    (x,) = inputs
    return [((x.dims[0], Dim("sums", _blocks(x.dims[-1].elements), 2)), x.dims[-1].axis)]


@op("column_sums", infer_column_sums)
def column_sums(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum and the sum of squares of each block; 0 for blocks of other ranks. It has no gradient."""
    (x,), dim = inputs, attrs["inputs"][0].dims[-1]
    out = np.zeros((len(x), _blocks(dim.elements), 2), x.dtype)
    first, _ = context.share(dim)
    for begin in range(0, x.shape[-1], FFN_UNIT):
        block = x[:, begin : begin + FFN_UNIT]
        out[:, (first + begin) // FFN_UNIT] = np.stack([block.sum(axis=-1), (block * block).sum(axis=-1)], axis=-1)
    return [out.reshape(len(x), -1)]


@lower("column_sums", "inference")
def lower_column_sums(lowering: ServingLowering, group: Group) -> None:
    (x,), (out,) = group.instr.inputs, group.instr.outputs
    first, source = x.dims[-1].share(lowering.mesh)[0] // FFN_UNIT, lowering.place_of(x)
    lowering.emit("column_sums", x=source, out=lowering.result(out), first=first, block=FFN_UNIT)


def infer_cut_rows(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the sums are those of other columns."""
    x, sums = inputs
    if sums.dims[-1].count != _blocks(x.dims[-1].elements):
        raise LayoutError(f"cut_rows of [{x.dims[-1]}] needs the sums of its blocks, and %{sums.name} has others")
    return [(x.dims, None)]


@op("cut_rows", infer_cut_rows)
def cut_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """max(x - mean - deviations * std, 0), with the mean and standard deviation of a row. It has no gradient."""
    x, sums = inputs
    columns = attrs["inputs"][0].dims[-1].elements
    total, squares = sums.astype(np.float64).reshape(len(x), -1, 2).sum(axis=1).T[:, :, None] / columns
    cut = total + attrs["deviations"] * np.sqrt(np.maximum(squares - total**2, 0))
    return [np.maximum(x - cut.astype(x.dtype), 0)]


@lower("cut_rows", "inference")
def lower_cut_rows(lowering: ServingLowering, group: Group) -> None:
    (x, sums), (out,) = group.instr.inputs, group.instr.outputs
    source, columns = lowering.place_of(x), x.dims[-1]
    place = lowering.buffer("arena", columns.local(lowering.mesh), rows=lowering.most_rows(out), selected=out.selected)
    lowering.at[out.name] = place
    more = {"columns": columns.elements, "deviations": group.instr.attrs["deviations"]}
    lowering.emit("cut_rows", x=source, sums=lowering.place_of(sums), out=place, **more)

"""output_rows: marks hidden states of the selected tokens as the program's output in place of logits. And mean_rows."""

import numpy as np

from ckdist.program.ops.op import ServingLowering, lower, op, unchanged
from ckdist.program.ops.op_types import Arrays, Attrs, Group, RankContext


@op("output_rows", unchanged)
def output_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The identity."""
    return inputs


@lower("output_rows", "inference")
def lower_output_rows(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, which also computes the norm and the residual that make the rows."""
    (x,) = group.instr.inputs
    source, norm = lowering.normed(x)
    out = lowering.buffer("hidden", x.dims[-1].elements)
    lowering.emit("output_rows", x.rows, **source.fields(), **norm, out=out)


@op("mean_rows", unchanged)
def mean_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Replaces each row by the mean of the sequence's rows."""
    return [np.tile(inputs[0].mean(axis=0, dtype=np.float64).astype(inputs[0].dtype), (len(inputs[0]), 1))]


@lower("mean_rows", "inference")
def lower_mean_rows(lowering: ServingLowering, group: Group) -> None:
    """Emits one step, which also computes the norm and the residual that make the rows."""
    (x,), (mean,) = group.instr.inputs, group.instr.outputs
    source, norm = lowering.normed(x)
    lowering.emit("mean_rows", x.rows, **source.fields(), **norm, out=lowering.result(mean))

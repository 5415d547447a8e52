"""The gradient of embed."""

import numpy as np

from ckdist.program.ops.op import TrainingLowering, lower, op
from ckdist.program.ops.op_types import Arrays, Attrs, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr


def infer_embed_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the table, partial if tokens are sharded."""
    ids, dy = inputs
    return [((attrs["vocab"], dy.dims[-1]), ids.dims[0].axis)]


@op("embed_grad", infer_embed_grad)
def embed_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Adds the row of each token to the row of its id, in token order, for ids in the rank's shard."""
    ids, dy = inputs
    begin, end = context.share(attrs["vocab"])
    mine = (ids >= begin) & (ids < end)
    table = np.zeros((end - begin, dy.shape[1]), dy.dtype)  # (vocab, hidden)
    np.add.at(table, ids[mine] - begin, dy[mine])
    return [table]


@lower("embed_grad", "training")
def lower_embed_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step, which adds to the gradient of the table."""
    first, _ = instr.attrs["vocab"].span(lowering.mesh)
    dy = lowering.place_of(instr.inputs[1])
    lowering.emit("embed_grad", dy=dy, gradient=lowering.added(instr.outputs[0]), first_row=first)

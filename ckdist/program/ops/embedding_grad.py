"""The gradient of embed."""

from typing import TYPE_CHECKING

from ckdist.program.ops.op import lower, op, whole
from ckdist.program.ops.op_types import Attrs, Inferred, Values, Weights
from ckdist.program.program import Instr

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.lower_training import TrainingLowering


def infer_embed_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the table, partial if tokens are sharded."""
    ids, dy = inputs
    whole("embed_grad", dy)
    return [((attrs["vocab"], dy.dims[-1]), ids.dims[0].axis)]


op("embed_grad", infer_embed_grad)


@lower("embed_grad", "training")
def lower_embed_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """Emits one step, which adds to the gradient of the table."""
    table = instr.outputs[0]
    lowering.is_fresh(table)
    first, _ = instr.attrs["vocab"].span(lowering.mesh)
    dy = lowering.place_of(instr.inputs[1])
    lowering.emit("embed_grad", dy=dy, gradient=lowering.gradient(table), first_row=first)

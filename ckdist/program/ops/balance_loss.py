"""balance_loss: the auxiliary load-balancing loss over the experts of all layers, and its gradient.

Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6; over the tokens of all layers, as transformers computes it.
"""

from typing import TYPE_CHECKING

from ckdist.program.ops.op import lower, op, vjp, whole
from ckdist.program.ops.op_types import Attrs, Gradients, Inferred, Values, Weights
from ckdist.program.program import Instr, Value

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.emitter import Emitter
    from ckdist.program.lower_training import TrainingLowering


def infer_balance_loss(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """A scalar, partial if tokens are sharded."""
    whole("balance_loss", *inputs)
    return [((), inputs[0].dims[0].axis)]


op("balance_loss", infer_balance_loss)


@vjp("balance_loss")
def balance_loss_vjp(g: "Emitter", instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction, for the gradient of the tally."""
    return [None, *g.emit("balance_loss_grad", (*instr.inputs, grads[0]), names=["d_tally"], **instr.attrs)]


def infer_balance_loss_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the tally."""
    whole("balance_loss_grad", *inputs)
    return [(inputs[1].dims, None)]


op("balance_loss_grad", infer_balance_loss_grad)


@lower("balance_loss", "training")
def lower_balance_loss(lowering: "TrainingLowering", instr: Instr) -> None:
    """No step: the gradient's step computes this loss too. A run without gradients leaves it out."""


@lower("balance_loss_grad", "training")
def lower_balance_loss_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """Emits one step."""
    lowering.emit(
        "balance_loss",
        tally=lowering.place_of(instr.inputs[1]),
        d_tally=lowering.output(instr.outputs[0]),
        layers=instr.attrs["layers"],
        coefficient=instr.attrs["coefficient"],
    )

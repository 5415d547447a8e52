"""balance_loss: the auxiliary load-balancing loss over the experts of all layers, and its gradient.

Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6; over the tokens of all layers, as transformers computes it.
"""

import numpy as np

from ckdist.program.ops.op import TrainingLowering, lower, op, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.ops.tally import counted
from ckdist.program.program import Instr, Value


def infer_balance_loss(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """A scalar, partial if tokens are sharded."""
    return [((), inputs[0].dims[0].axis)]


def factor(context: RankContext, targets: np.ndarray, tally: np.ndarray, attrs: Attrs) -> float:
    """Returns coefficient * targets * experts / rows**2, the factor on sum over experts of (taken * scores).

    `rows` is the number of counted tokens of all layers. Losses are sums over targets, hence the number of targets.
    """
    rows = max(1, attrs["layers"] * np.count_nonzero(counted(context, targets)))
    return attrs["coefficient"] * np.count_nonzero(targets >= 0) * (len(tally) // 2) / rows**2


@op("balance_loss", infer_balance_loss)
def balance_loss(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns factor * sum over experts of (how often it is taken * sum of its scores)."""
    taken, scores = np.split(inputs[1], 2)
    found = factor(context, inputs[0], inputs[1], attrs) * (taken * scores).sum()
    return [np.asarray(found, inputs[1].dtype)]


@vjp("balance_loss")
def balance_loss_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction, for the gradient of the tally."""
    return [None, *g.emit("balance_loss_grad", (*instr.inputs, grads[0]), names=["d_tally"], **instr.attrs)]


def infer_balance_loss_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the tally."""
    return [(inputs[1].dims, None)]


@op("balance_loss_grad", infer_balance_loss_grad)
def balance_loss_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With the tally [taken, scores]: d_tally = d_loss * factor * [scores, taken]."""
    targets, tally, d_loss = inputs
    taken, scores = np.split(tally, 2)
    found = d_loss * factor(context, targets, tally, attrs) * np.concatenate([scores, taken])
    return [found.astype(tally.dtype)]


@lower("balance_loss", "training")
def lower_balance_loss(lowering: TrainingLowering, instr: Instr) -> None:
    """No step: the gradient's step computes this loss too. A run without gradients leaves it out."""


@lower("balance_loss_grad", "training")
def lower_balance_loss_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step."""
    lowering.emit(
        "balance_loss",
        tally=lowering.place_of(instr.inputs[1]),
        d_tally=lowering.output(instr.outputs[0]),
        layers=instr.attrs["layers"],
        coefficient=instr.attrs["coefficient"],
    )

"""balance_loss: what is added to a loss so that experts are taken evenly, of all layers together, and its gradient.

Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6; over the tokens of all layers, as transformers computes it.
"""

from typing import TYPE_CHECKING

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.experts import scores_of
from ckdist.program.ops.op import Arrays, Attrs, Gradients, Inferred, Values, Weights, lower, op, vjp, whole
from ckdist.program.program import Instr, Value
from ckdist.program.rank_context import RankContext

if TYPE_CHECKING:  # which import the ops
    from ckdist.program.emitter import Emitter
    from ckdist.program.lower_training import TrainingLowering


def layers_of(inputs: Values) -> list[tuple[Value, Value]]:
    """The logits and the chosen experts of each layer, which stand by turns behind the targets."""
    return list(zip(inputs[1::2], inputs[2::2], strict=True))


def infer_balance_loss(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """A number, partial where tokens are sharded. LayoutError where layers have unequal numbers of experts."""
    whole("balance_loss", *inputs)
    if len({logits.dims for logits, _ in layers_of(inputs)}) != 1:
        raise LayoutError("balance_loss needs layers that choose from equal numbers of experts")
    return [((), inputs[0].dims[0].axis)]


class Balance:
    """With C the times that each expert is taken and S the sum of its softmax, over the rows of all layers, whose
    number is N: experts * sum(C / N * S / N). Rows are the tokens of sequences with a target.
    """

    def __init__(self, context: RankContext, inputs: Arrays):
        targets, *rest = inputs
        self.counted = np.zeros(len(targets), bool)  # tokens
        for sequence in context.sequences():
            self.counted[sequence] = np.any(targets[sequence] >= 0)
        self.targets = np.count_nonzero(targets >= 0)
        self.scores = [scores_of(logits, "softmax") for logits in rest[::2]]  # (tokens, experts) each
        self.experts = self.scores[0].shape[1]
        self.rows = max(1, len(self.scores) * np.count_nonzero(self.counted))
        chosen = np.concatenate([of[self.counted].ravel() for of in rest[1::2]])
        self.taken = np.bincount(chosen, minlength=self.experts) / self.rows
        self.share = sum(scores[self.counted].sum(axis=0) for scores in self.scores) / self.rows


@op("balance_loss", infer_balance_loss)
def balance_loss(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The coefficient times the batch's targets, of which losses are the sum, times the loss; see `Balance`."""
    b = Balance(context, inputs)
    return [np.asarray(attrs["coefficient"] * b.targets * b.experts * (b.taken * b.share).sum(), inputs[1].dtype)]


@vjp("balance_loss")
def balance_loss_vjp(g: "Emitter", instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of the logits of all layers."""
    layers = len(instr.inputs) // 2
    names = ["d_router"] * layers
    found = g.emit("balance_loss_grad", (*instr.inputs, grads[0]), names=names, **instr.attrs)
    results: Gradients = [None] * len(wanted)
    results[1::2] = found
    return results


def infer_balance_loss_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As the logits of each layer."""
    whole("balance_loss_grad", *inputs)
    return [(logits.dims, None) for logits, _ in layers_of(inputs[:-1])]


@op("balance_loss_grad", infer_balance_loss_grad)
def balance_loss_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Through the softmax alone: the numbers of times are no function of the logits."""
    *operands, d_loss = inputs
    b = Balance(context, operands)
    factor = d_loss * attrs["coefficient"] * b.targets * b.experts / b.rows * b.counted[:, None]
    return [(factor * p * (b.taken - (p * b.taken).sum(axis=-1, keepdims=True))).astype(p.dtype) for p in b.scores]


@lower("balance_loss", "training")
def lower_balance_loss(lowering: "TrainingLowering", instr: Instr) -> None:
    """No step: that of its gradient computes it, and a loss alone is without it."""


@lower("balance_loss_grad", "training")
def lower_balance_loss_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """One step."""
    layers = [
        {"logits": lowering.value(logits), "chosen": lowering.value(chosen), "d_logits": lowering.output(out)}
        for (logits, chosen), out in zip(layers_of(instr.inputs[:-1]), instr.outputs, strict=True)
    ]
    lowering.emit("balance_loss", count=len(layers), layers=layers, coefficient=instr.attrs["coefficient"])

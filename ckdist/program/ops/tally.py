"""tally: of each expert how often it was taken, and the sum of its scores, over the tokens of layers. What balances the
choice of experts is made of it (`balance_loss`).

Of a model's stages each adds its layers' to what the one before it sends.
"""

from typing import TYPE_CHECKING

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.experts import scores_of
from ckdist.program.ops.op import Arrays, Attrs, Gradients, Inferred, Values, Weights, lower, op, vjp, whole
from ckdist.program.program import Instr, Value
from ckdist.program.rank_context import RankContext
from ckdist.program.step import ABSENT, ValueIndex

if TYPE_CHECKING:  # which import the ops
    from ckdist.program.emitter import Emitter
    from ckdist.program.lower_training import TrainingLowering


def layers_of(inputs: Values) -> list[tuple[Value, Value]]:
    """The logits and the chosen experts of each layer, which stand by turns behind the targets."""
    return list(zip(inputs[1::2], inputs[2::2], strict=False))


def before_of(inputs: Values) -> Value | None:
    """The tally of the layers before these, which is the last input where there is one."""
    return inputs[-1] if len(inputs) % 2 == 0 else None


def infer_tally(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(2 experts,), of a rank's tokens. LayoutError where layers have unequal numbers of experts."""
    whole("tally", *inputs)
    if len({logits.dims for logits, _ in layers_of(inputs)}) != 1:
        raise LayoutError("a tally needs layers that choose from equal numbers of experts")
    return [((Dim("tally", 2 * inputs[1].dims[1].count),), None)]


def counted(context: RankContext, targets: np.ndarray) -> np.ndarray:
    """(tokens,) bools: those of sequences with a target."""
    found = np.zeros(len(targets), bool)
    for sequence in context.sequences():
        found[sequence] = np.any(targets[sequence] >= 0)
    return found


@op("tally", infer_tally)
def tally(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Of the counted tokens."""
    rows, before = counted(context, inputs[0]), inputs[-1] if len(inputs) % 2 == 0 else 0
    logits, chosen = inputs[1::2][: (len(inputs) - 1) // 2], inputs[2::2]
    experts = logits[0].shape[1]
    taken = np.bincount(np.concatenate([of[rows].ravel() for of in chosen]), minlength=experts)
    scores = sum(scores_of(of, "softmax")[rows].sum(axis=0) for of in logits)
    return [np.concatenate([taken, scores]).astype(logits[0].dtype) + before]


@vjp("tally")
def tally_vjp(g: "Emitter", instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of the logits of all layers. What was there before has the sum's."""
    results: Gradients = [None] * len(wanted)
    layers = layers_of(instr.inputs)
    logits = [of for of, _ in layers]
    results[1 : 2 * len(layers) : 2] = g.emit(
        "tally_grad", (instr.inputs[0], *logits, grads[0]), names=["d_router"] * len(layers)
    )
    if before_of(instr.inputs) is not None:
        results[-1] = grads[0]
    return results


def infer_tally_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As the logits of each layer."""
    whole("tally_grad", *inputs)
    return [(logits.dims, None) for logits in inputs[1:-1]]


@op("tally_grad", infer_tally_grad)
def tally_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Through the softmax alone: the numbers of times are no function of the logits."""
    targets, *logits, d = inputs
    rows, d = counted(context, targets)[:, None], d[len(d) // 2 :]
    scores = [scores_of(of, "softmax") for of in logits]
    return [(rows * p * (d - (p * d).sum(axis=-1, keepdims=True))).astype(p.dtype) for p in scores]


@lower("tally", "training")
def lower_tally(lowering: "TrainingLowering", instr: Instr) -> None:
    """A step; none where only a loss alone reads it, which is without it."""
    if lowering.is_for_loss_alone(instr.outputs[0]):
        return
    layers = [
        {"logits": lowering.value(logits), "chosen": lowering.value(chosen)}
        for logits, chosen in layers_of(instr.inputs)
    ]
    before = before_of(instr.inputs)
    of_before = ValueIndex(ABSENT) if before is None else lowering.value(before)
    out = lowering.output(instr.outputs[0])
    lowering.emit("tally", out=out, before=of_before, count=len(layers), layers=layers)


@lower("tally_grad", "training")
def lower_tally_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """A step."""
    _, *logits, d = instr.inputs
    layers = [
        {"logits": lowering.value(of), "d_logits": lowering.output(out)}
        for of, out in zip(logits, instr.outputs, strict=True)
    ]
    lowering.emit("tally_grad", d_tally=lowering.value(d), count=len(layers), layers=layers)

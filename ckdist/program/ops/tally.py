"""tally: how often each expert was chosen, and the sum of its scores, over the tokens of all layers.

balance_loss, the auxiliary load-balancing loss, reads it: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6; over
the tokens of all layers, as transformers computes it. A pipeline stage adds its own layers to the tally that the
previous stage sends.
"""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Dim
from ckdist.program.ops.experts import scores_of
from ckdist.program.ops.op import TrainingLowering, lower, op, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.program import Instr, Value


def layers_of(inputs: Values) -> list[tuple[Value, Value]]:
    """The logits and the chosen experts of each layer. They alternate in the inputs, after the targets."""
    return list(zip(inputs[1::2], inputs[2::2], strict=False))


def before_of(inputs: Values) -> Value | None:
    """The tally of earlier layers: the last input, or None if there is none."""
    return inputs[-1] if len(inputs) % 2 == 0 else None


def infer_tally(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """(2 * experts,), over the tokens of a rank. Raises LayoutError if layers differ in their number of experts."""
    if len({logits.dims for logits, _ in layers_of(inputs)}) != 1:
        raise LayoutError("a tally needs layers that choose from equal numbers of experts")
    return [((Dim("tally", 2 * inputs[1].dims[1].count),), None)]


def counted(context: RankContext, targets: np.ndarray) -> np.ndarray:
    """(tokens,) bools: whether a token is in a sequence that has a target."""
    found = np.zeros(len(targets), bool)
    for sequence in context.sequences():
        found[sequence] = np.any(targets[sequence] >= 0)
    return found


@op("tally", infer_tally)
def tally(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """[how often each expert was chosen, sum of its scores] over the counted tokens, plus the tally before."""
    rows, before = counted(context, inputs[0]), inputs[-1] if len(inputs) % 2 == 0 else 0
    logits, chosen = inputs[1::2][: (len(inputs) - 1) // 2], inputs[2::2]
    experts = logits[0].shape[1]
    taken = np.bincount(np.concatenate([of[rows].ravel() for of in chosen]), minlength=experts)
    scores = sum(scores_of(of, "softmax")[rows].sum(axis=0) for of in logits)
    return [np.concatenate([taken, scores]).astype(logits[0].dtype) + before]


@vjp("tally")
def tally_vjp(g: Emitter, instr: Instr, grads: list[Value], wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of the logits of all layers. The tally before gets the gradient of the sum."""
    logits = [of for of, _ in layers_of(instr.inputs)]
    found = g.emit("tally_grad", (instr.inputs[0], *logits, grads[0]), names=["d_router"] * len(logits))
    by_layer = [gradient for of_logits in found for gradient in (of_logits, None)]
    return [None, *by_layer, *([] if before_of(instr.inputs) is None else grads)]


def infer_tally_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the logits of each layer."""
    return [(logits.dims, None) for logits in inputs[1:-1]]


@op("tally_grad", infer_tally_grad)
def tally_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The gradient through the softmax. How often an expert was chosen has no gradient."""
    targets, *logits, d = inputs
    rows, d = counted(context, targets)[:, None], d[len(d) // 2 :]
    scores = [scores_of(of, "softmax") for of in logits]
    return [(rows * p * (d - (p * d).sum(axis=-1, keepdims=True))).astype(p.dtype) for p in scores]


@lower("tally", "training")
def lower_tally(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step. None if only the balance loss reads it, without its gradient."""
    if lowering.is_for_loss_alone(instr.outputs[0]):
        return
    layers = [
        {"logits": lowering.place_of(logits), "chosen": lowering.place_of(chosen)}
        for logits, chosen in layers_of(instr.inputs)
    ]
    before, out = lowering.place_of(before_of(instr.inputs)), lowering.output(instr.outputs[0])
    lowering.emit("tally", out=out, before=before, count=len(layers), layers=layers)


@lower("tally_grad", "training")
def lower_tally_grad(lowering: TrainingLowering, instr: Instr) -> None:
    _, *logits, d = instr.inputs
    layers = [
        {"logits": lowering.place_of(of), "d_logits": lowering.output(out)}
        for of, out in zip(logits, instr.outputs, strict=True)
    ]
    lowering.emit("tally_grad", d_tally=lowering.place_of(d), count=len(layers), layers=layers)


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
    lowering.emit(
        "balance_loss",
        tally=lowering.place_of(instr.inputs[1]),
        d_tally=lowering.output(instr.outputs[0]),
        layers=instr.attrs["layers"],
        coefficient=instr.attrs["coefficient"],
    )

"""cross_entropy fused with the output projection, its gradient, and the one that a backward pass begins with."""

from typing import TYPE_CHECKING

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.op import Arrays, Attrs, Gradients, Inferred, Values, Weights, lower, op, vjp, whole
from ckdist.program.program import Instr
from ckdist.program.rank_context import RankContext
from ckdist.program.step import ABSENT, GradientIndex, PackIndex, ValueIndex

if TYPE_CHECKING:  # which import the ops
    from ckdist.program.emitter import Emitter
    from ckdist.program.lower_training import TrainingLowering


def infer_cross_entropy(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The loss, partial where tokens are sharded, and a number for each token.

    LayoutError where the operands do not fit, or the matrix is sharded.
    """
    (x, targets), (head,) = inputs[:2], weights
    whole("cross_entropy", *inputs)
    vocab, hidden = head.dims
    if x.dims[-1] != hidden:
        raise LayoutError(f"cross_entropy: %{x.name} ends in [{x.dims[-1]}], {head} reads [{hidden}]")
    if vocab.axis or hidden.axis:
        raise LayoutError(
            f"cross_entropy needs all of {vocab.name} and {hidden.name}, "
            f"but {head} is sharded over {vocab.axis or hidden.axis}"
        )
    if x.dims[:1] != targets.dims:
        raise LayoutError(
            f"cross_entropy: %{x.name} has rows [{x.dims[0]}], %{targets.name} [{', '.join(map(str, targets.dims))}]"
        )
    return [((), x.dims[0].axis), ((x.dims[0],), None)]


@op("cross_entropy", infer_cross_entropy)
def cross_entropy(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The sum over the tokens with a target (not -1) of log_sum_exp(logits) - logits[target], and log_sum_exp,
    (tokens,), 0 elsewhere.
    """
    (x, targets), (head,) = inputs, weights
    rows = np.flatnonzero(targets >= 0)
    capped = cap(x[rows] @ head.T, attrs["soft_cap"])  # (rows, vocab)
    largest = capped.max(axis=-1, initial=-np.inf)
    log_sum_exp = np.zeros(len(x), x.dtype)
    log_sum_exp[rows] = largest + np.log(np.exp(capped - largest[:, None]).sum(axis=-1))
    return [(log_sum_exp[rows] - capped[np.arange(len(rows)), targets[rows]]).sum(), log_sum_exp]


def cap(logits: np.ndarray, soft_cap: float) -> np.ndarray:
    """Logits with the soft cap, where it is not 0."""
    return soft_cap * np.tanh(logits / soft_cap) if soft_cap else logits


@lower("cross_entropy", "training")
def lower_cross_entropy(lowering: "TrainingLowering", instr: Instr) -> None:
    """One step; none where that of its gradient computes the loss too."""
    if instr.outputs[1] in lowering.names.readers:
        return
    lowering.emit(
        "cross_entropy",
        x=lowering.operand(instr.inputs[0]),
        dx=ValueIndex(ABSENT),
        head=lowering.pack(False, instr.weight(0)),
        head_transposed=PackIndex(ABSENT),
        gradient=GradientIndex(ABSENT),
        fresh=False,
        soft_cap=instr.attrs["soft_cap"],
    )


@vjp("cross_entropy")
def cross_entropy_vjp(g: "Emitter", instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of x and of the matrix. LayoutError for one through the log-sum-exp."""
    if grads[0] is None or grads[1] is not None:
        raise LayoutError(
            f"cross_entropy has no gradient through its log-sum-exp %{instr.outputs[1].name}; only through the loss"
        )
    (x, targets), head, names = instr.inputs, instr.weight(0), ["d_logits"]
    if wanted[2]:
        names.append(f"d_{head.name}")
    operands = (x, targets, instr.outputs[1], grads[0])
    dx, *dw = g.emit(
        "cross_entropy_grad", operands, (head,), names, soft_cap=instr.attrs["soft_cap"], weight_grad=wanted[2]
    )
    return [dx, None, *(dw or [None])]


def infer_cross_entropy_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As x, and as the matrix where its gradient is wanted."""
    x, _, _, d_loss = inputs
    (_, partial), _ = infer_cross_entropy(inputs, weights, attrs)
    if d_loss.dims:
        raise LayoutError(
            f"cross_entropy_grad needs a number, but %{d_loss.name} is [{', '.join(map(str, d_loss.dims))}]"
        )
    outputs: Inferred = [(x.dims, None)]
    return [*outputs, (weights[0].dims, partial)] if attrs["weight_grad"] else outputs


@op("cross_entropy_grad", infer_cross_entropy_grad)
def cross_entropy_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With d = d_loss * (softmax(logits) - onehot(target)), 0 without a target: dx = d @ head; with `weight_grad`
    also d.T @ x.
    """
    (x, targets, log_sum_exp, d_loss), (head,) = inputs, weights
    rows = np.flatnonzero(targets >= 0)
    capped = cap(x[rows] @ head.T, attrs["soft_cap"])
    d = np.exp(capped - log_sum_exp[rows, None])  # (rows, vocab)
    d[np.arange(len(rows)), targets[rows]] -= 1
    if attrs["soft_cap"]:
        d = d * (1 - (capped / attrs["soft_cap"]) ** 2)
    d = d * d_loss
    dx = np.zeros_like(x)
    dx[rows] = d @ head
    return [dx, d.T @ x[rows]] if attrs["weight_grad"] else [dx]


@lower("cross_entropy_grad", "training")
def lower_cross_entropy_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """One step for the loss and its gradients."""
    head, (dx, *d_head) = instr.weight(0), instr.outputs
    lowering.emit(
        "cross_entropy",
        x=lowering.operand(instr.inputs[0]),
        dx=lowering.output(dx),
        head=lowering.pack(False, head),
        head_transposed=lowering.pack(True, head),
        gradient=lowering.gradient(d_head[0]) if d_head else GradientIndex(ABSENT),
        fresh=bool(d_head) and lowering.is_fresh(d_head[0]),
        soft_cap=instr.attrs["soft_cap"],
    )


def infer_one(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """A number."""
    return [((), None)]


@op("one", infer_one)
def one(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The number 1: the gradient of the loss by itself."""
    return [np.ones((), np.float32)]


@lower("one", "training")
def lower_one(lowering: "TrainingLowering", instr: Instr) -> None:
    """No step: the gradients are those of the loss itself."""

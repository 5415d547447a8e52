"""cross_entropy fused with the output projection, its gradient, and the constant 1 that starts a backward pass.

With a teacher's most probable tokens as operands, the loss also has the divergence from the teacher (teacher_loss).
"""

from collections.abc import Sequence

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.collectives import in_groups
from ckdist.program.ops.op import TrainingLowering, lower, op, total, vjp
from ckdist.program.ops.op_types import Arrays, Attrs, Emitter, Gradients, Inferred, RankContext, Values, Weights
from ckdist.program.ops.teacher_loss import divergence, logit_gradient
from ckdist.program.program import Instr, Value
from ckdist.program.step import ABSENT, PackIndex, ValueIndex


def infer_cross_entropy(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The loss, partial if tokens are sharded, and one number per token. A sharded vocabulary makes neither partial.

    Raises LayoutError if the operands do not fit, or the columns of the matrix are sharded.
    """
    (x, targets), (head,) = inputs[:2], weights
    _, hidden = head.dims
    if x.dims[-1] != hidden:
        raise LayoutError(f"cross_entropy: %{x.name} ends in [{x.dims[-1]}], {head} reads [{hidden}]")
    if hidden.axis:
        raise LayoutError(f"cross_entropy needs all of {hidden.name}, but {head} is sharded over {hidden.axis}")
    if x.dims[:1] != targets.dims:
        raise LayoutError(
            f"cross_entropy: %{x.name} has rows [{x.dims[0]}], %{targets.name} [{', '.join(map(str, targets.dims))}]"
        )
    per_token = ((x.dims[0],), None)
    return [((), x.dims[0].axis), per_token, *([per_token] if len(inputs) > 2 else [])]


@op("cross_entropy", infer_cross_entropy, collective=True)
def cross_entropy(contexts: Sequence[RankContext], inputs: list[Arrays], attrs: Attrs) -> list[Arrays]:
    """Sum over tokens with a target (not -1) of log_sum_exp(logits) - logits[target].

    The second output is log_sum_exp, (tokens,), 0 without a target. If the vocabulary is sharded, ranks add up their
    parts of both: Shoeybi et al. 2019, arXiv:1909.08053, section 3.

    Two more operands are a teacher's: ids and log-probabilities, (tokens, choices). The loss is then `target_weight` *
    cross-entropy + `teacher_weight` * divergence, and the third output is the divergence's ratio of the rest.
    """
    vocab, parts = attrs["weights"][0].dims[0], []
    capped = [_capped(own, head, attrs) for own, (head,) in zip(inputs, attrs["arrays"], strict=True)]
    largest = [logits.max(axis=-1, initial=-np.inf) for logits in capped]  # (rows,)
    if vocab.axis:
        most = lambda parts: np.max(parts, axis=0)
        largest = [own for (own,) in in_groups(contexts, [[own] for own in largest], vocab.axis, most)]
    for context, (_, targets, *teacher), logits, most in zip(contexts, inputs, capped, largest, strict=True):
        ids = np.column_stack([targets, *teacher[:1]])[targets >= 0]  # (rows, 1 + choices)
        own = ids - context.share(vocab)[0]
        found = np.zeros(own.shape, logits.dtype)
        row, place = np.nonzero((own >= 0) & (own < logits.shape[1]))
        found[row, place] = logits[row, own[row, place]]
        parts.append([np.column_stack([np.exp(logits - most[:, None]).sum(axis=-1), found])])
    if vocab.axis:
        parts = in_groups(contexts, parts, vocab.axis, total)
    results: list[Arrays] = []
    for (x, targets, *teacher), most, (sums,) in zip(inputs, largest, parts, strict=True):
        learned = targets >= 0
        log_sum_exp = np.zeros(len(x), x.dtype)
        log_sum_exp[learned] = most + np.log(sums[:, 0])
        losses, rest = log_sum_exp[learned] - sums[:, 1], []
        if teacher:
            logprobs = teacher[1][learned].astype(x.dtype)
            apart, ratio = divergence(logprobs, sums[:, 2:] - log_sum_exp[learned, None])
            losses = attrs["target_weight"] * losses + attrs["teacher_weight"] * apart
            rest = [np.zeros(len(x), x.dtype)]
            rest[0][learned] = ratio
        results.append([losses.sum(), log_sum_exp, *rest])
    return results


def _capped(inputs: Arrays, head: np.ndarray, attrs: Attrs) -> np.ndarray:
    """The logits of the tokens with a target, (rows, vocab)."""
    x, targets = inputs[:2]
    return cap(x[targets >= 0] @ head.T, attrs["soft_cap"])


def cap(logits: np.ndarray, soft_cap: float) -> np.ndarray:
    """Applies the soft cap to logits, unless it is 0."""
    return soft_cap * np.tanh(logits / soft_cap) if soft_cap else logits


@lower("cross_entropy", "training")
def lower_cross_entropy(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step. None if there is a gradient: its step computes the loss too."""
    if not lowering.graph.readers(instr.outputs[1]):
        _emit_loss(lowering, instr, None, None)


def _emit_loss(lowering: TrainingLowering, instr: Instr, dx: Value | None, d_head: Value | None) -> None:
    """Emits the step for the loss and its gradients, as far as they are wanted."""
    head, attrs = instr.weight(0), instr.attrs
    lowering.emit(
        "cross_entropy",
        x=lowering.operand(instr.inputs[0]),
        dx=lowering.output(dx) if dx else ValueIndex(ABSENT),
        head=lowering.pack(False, head),
        head_transposed=lowering.pack(True, head) if dx else PackIndex(ABSENT),
        gradient=lowering.gradient(d_head),
        fresh=d_head is not None and lowering.is_fresh(d_head),
        soft_cap=attrs["soft_cap"],
        first_row=head.dims[0].span(lowering.mesh)[0],
        target_weight=attrs.get("target_weight", 1.0),
        teacher_weight=attrs.get("teacher_weight", 0.0),
        choices=instr.inputs[-2].dims[-1].elements if "teacher_weight" in attrs else 0,
    )


@vjp("cross_entropy")
def cross_entropy_vjp(g: Emitter, instr: Instr, grads: Gradients, wanted: list[bool]) -> Gradients:
    """One instruction for the gradients of x and the matrix. Raises LayoutError if the log-sum-exp has a gradient."""
    if grads[0] is None or any(grad is not None for grad in grads[1:]):
        raise LayoutError(
            f"cross_entropy has no gradient through its log-sum-exp %{instr.outputs[1].name}; only through the loss"
        )
    (x, targets, *teacher), head, names = instr.inputs, instr.weight(0), ["d_logits"]
    if wanted[-1]:
        names.append(f"d_{head.name}")
    # The operands of a teacher: the ratio of the rest, ids, log-probabilities.
    operands = (x, targets, instr.outputs[1], grads[0], *instr.outputs[2:], *teacher)
    dx, *dw = g.emit("cross_entropy_grad", operands, (head,), names, **instr.attrs, weight_grad=wanted[-1])
    return [dx, *[None] * (len(instr.inputs) - 1), *(dw or [None])]


def infer_cross_entropy_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x, partial if the vocabulary is sharded, and those of the matrix if its gradient is wanted."""
    x, _, _, d_loss = inputs[:4]
    _, partial = infer_cross_entropy(inputs[:2], weights, attrs)[0]
    if d_loss.dims:
        raise LayoutError(
            f"cross_entropy_grad needs a number, but %{d_loss.name} is [{', '.join(map(str, d_loss.dims))}]"
        )
    outputs: Inferred = [(x.dims, weights[0].dims[0].axis)]
    return [*outputs, (weights[0].dims, partial)] if attrs["weight_grad"] else outputs


@op("cross_entropy_grad", infer_cross_entropy_grad)
def cross_entropy_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With d = d_loss * (softmax(logits) - onehot(target)), 0 without a target: dx = d @ head and dw = d.T @ x.

    dw only with `weight_grad`.
    """
    (x, targets, log_sum_exp, d_loss, *teacher), (head,) = inputs, weights
    rows = np.flatnonzero(targets >= 0)
    capped = cap(x[rows] @ head.T, attrs["soft_cap"])
    d = np.exp(capped - log_sum_exp[rows, None])  # (rows, vocab)
    own = targets[rows] - context.share(attrs["weights"][0].dims[0])[0]
    found = np.flatnonzero((own >= 0) & (own < len(head)))
    if teacher:
        ratio, ids, logprobs = (values[rows] for values in teacher)
        ids = ids - context.share(attrs["weights"][0].dims[0])[0]
        d = logit_gradient(d, ids, logprobs, ratio, attrs["target_weight"], attrs["teacher_weight"])
    d[found, own[found]] -= attrs.get("target_weight", 1)
    if attrs["soft_cap"]:
        d = d * (1 - (capped / attrs["soft_cap"]) ** 2)
    d = d * d_loss
    dx = np.zeros_like(x)
    dx[rows] = d @ head
    return [dx, d.T @ x[rows]] if attrs["weight_grad"] else [dx]


@lower("cross_entropy_grad", "training")
def lower_cross_entropy_grad(lowering: TrainingLowering, instr: Instr) -> None:
    """Emits one step for the loss and its gradients."""
    dx, d_head, *_ = *instr.outputs, None
    _emit_loss(lowering, instr, dx, d_head)


def infer_one(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """A scalar."""
    return [((), None)]


@op("one", infer_one)
def one(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The number 1: the derivative of the loss by itself."""
    return [np.ones((), np.float32)]


@lower("one", "training")
def lower_one(lowering: TrainingLowering, instr: Instr) -> None:
    """No step: the steps of gradients have the factor 1 built in."""

"""The definitions in numpy of the ops in `ckdist/program/ops/loss.py`."""

from collections.abc import Sequence

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from ckdist.program.ops.teacher_loss import divergence
from tests.support.rank_context import RankContext
from tests.support.references import reference, total
from tests.support.references.collectives import in_groups
from tests.support.references.teacher_loss import logit_gradient


@reference("cross_entropy")
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


@reference("cross_entropy_grad")
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


@reference("one")
def one(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The number 1: the derivative of the loss by itself."""
    return [np.ones((), np.float32)]

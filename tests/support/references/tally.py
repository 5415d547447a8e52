"""The definitions in numpy of the ops in `ckdist/program/ops/tally.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.experts import scores_of


def counted(context: RankContext, targets: np.ndarray) -> np.ndarray:
    """(tokens,) bools: whether a token is in a sequence that has a target."""
    found = np.zeros(len(targets), bool)
    for sequence in context.sequences():
        found[sequence] = np.any(targets[sequence] >= 0)
    return found


@reference("tally")
def tally(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """[how often each expert was chosen, sum of its scores] over the counted tokens, plus the tally before."""
    rows, before = counted(context, inputs[0]), inputs[-1] if len(inputs) % 2 == 0 else 0
    logits, chosen = inputs[1::2][: (len(inputs) - 1) // 2], inputs[2::2]
    experts = logits[0].shape[1]
    taken = np.bincount(np.concatenate([of[rows].ravel() for of in chosen]), minlength=experts)
    scores = sum(scores_of(of, "softmax")[rows].sum(axis=0) for of in logits)
    return [np.concatenate([taken, scores]).astype(logits[0].dtype) + before]


@reference("tally_grad")
def tally_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The gradient through the softmax. How often an expert was chosen has no gradient."""
    targets, *logits, d = inputs
    rows, d = counted(context, targets)[:, None], d[len(d) // 2 :]
    scores = [scores_of(of, "softmax") for of in logits]
    return [(rows * p * (d - (p * d).sum(axis=-1, keepdims=True))).astype(p.dtype) for p in scores]

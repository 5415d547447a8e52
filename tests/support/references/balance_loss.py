"""The definitions in numpy of the ops in `ckdist/program/ops/balance_loss.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.tally import counted


def factor(context: RankContext, targets: np.ndarray, tally: np.ndarray, attrs: Attrs) -> float:
    """Returns coefficient * targets * experts / rows**2, the factor on sum over experts of (taken * scores).

    `rows` is the number of counted tokens of all layers. Losses are sums over targets, hence the number of targets.
    """
    rows = max(1, attrs["layers"] * np.count_nonzero(counted(context, targets)))
    return attrs["coefficient"] * np.count_nonzero(targets >= 0) * (len(tally) // 2) / rows**2


@reference("balance_loss")
def balance_loss(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns factor * sum over experts of (how often it is taken * sum of its scores)."""
    taken, scores = np.split(inputs[1], 2)
    found = factor(context, inputs[0], inputs[1], attrs) * (taken * scores).sum()
    return [np.asarray(found, inputs[1].dtype)]


@reference("balance_loss_grad")
def balance_loss_grad(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """With the tally [taken, scores]: d_tally = d_loss * factor * [scores, taken]."""
    targets, tally, d_loss = inputs
    taken, scores = np.split(tally, 2)
    found = d_loss * factor(context, targets, tally, attrs) * np.concatenate([scores, taken])
    return [found.astype(tally.dtype)]

"""The definitions in numpy of the ops in `ckdist/program/ops/teacher_loss.py`."""

import numpy as np


def logit_gradient(
    q: np.ndarray, ids: np.ndarray, teacher: np.ndarray, ratio: np.ndarray, target_weight: float, teacher_weight: float
) -> np.ndarray:
    """The gradient by the logits, (rows, vocab), without the target's own part.

    Args:
        q: (rows, vocab) probabilities of the student.
        ids: (rows, choices) columns of q; others belong to other ranks.
        teacher: (rows, choices) log-probabilities.
        ratio: (rows,) p_rest / q_rest.
    """
    d = q * (target_weight + teacher_weight * (1 - ratio))[:, None]
    row, choice = np.nonzero((ids >= 0) & (ids < q.shape[1]))
    column = ids[row, choice]
    d[row, column] = (target_weight + teacher_weight) * q[row, column] - teacher_weight * np.exp(teacher[row, choice])
    return d

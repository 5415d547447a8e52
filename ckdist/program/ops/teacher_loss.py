"""Forward Kullback-Leibler divergence from a teacher, by the teacher's most probable tokens.

All other tokens count as one event, the rest: KL = sum over choices of p (log p - log q) + p_rest log(p_rest / q_rest).
The gradient by a logit j is q_j - p_j for a choice, and q_j (1 - p_rest / q_rest) for any other token.
"""

import numpy as np

LEAST_REST = 1e-6  # a smaller q_rest is rounding: 1 - the sum of the choices' probabilities


def divergence(teacher: np.ndarray, student: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the divergence and p_rest / q_rest, both (rows,).

    Args:
        teacher: (rows, choices) log-probabilities.
        student: (rows, choices) log-probabilities of the same tokens.
    """
    p = np.exp(teacher)
    p_rest = np.maximum(1 - p.sum(axis=-1), 0)
    ratio = p_rest / np.maximum(1 - np.exp(student).sum(axis=-1), LEAST_REST)
    rest = p_rest * np.log(np.where(ratio > 0, ratio, 1))
    return (p * (teacher - student)).sum(axis=-1) + rest, ratio


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

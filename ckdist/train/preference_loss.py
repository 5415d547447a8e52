"""The losses of preferences (DPO, ORPO, KTO) as functions of log-probabilities of answers, with their derivatives.

A unit has two sequences: the chosen and the rejected answer; for KTO, the answer and one that belongs to another
prompt. `policy` and `reference` are float64 (units, 2): each answer's sum of log-probabilities of its tokens.
"""

from typing import NamedTuple

import numpy as np


class UnitLosses(NamedTuple):
    """Losses of units and their derivatives."""

    losses: np.ndarray  # float64 (units,)
    slopes: np.ndarray  # float64 (units, 2): d loss / d policy


def dpo(policy: np.ndarray, reference: np.ndarray, lengths: np.ndarray, beta: float, loss_type: str) -> UnitLosses:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) with the loss sigmoid, hinge or ipo.

    ipo (Azar et al. 2023, arXiv:2310.12036) takes means over an answer's tokens. `lengths`: (units, 2) tokens.
    """
    scale = 1.0 / np.maximum(lengths, 1) if loss_type == "ipo" else np.ones(policy.shape)
    ratios = (policy - reference) * scale
    margin = ratios[:, 0] - ratios[:, 1]
    if loss_type == "ipo":
        losses, slope = (margin - 0.5 / beta) ** 2, 2 * (margin - 0.5 / beta)
    elif loss_type == "hinge":
        losses, slope = np.maximum(0.0, 1 - beta * margin), np.where(beta * margin < 1, -beta, 0.0)
    else:
        losses, slope = np.logaddexp(0.0, -beta * margin), -beta * sigmoid(-beta * margin)
    return UnitLosses(losses, slope[:, None] * [1.0, -1.0] * scale)


def orpo(policy: np.ndarray, lengths: np.ndarray, beta: float) -> UnitLosses:
    """The odds-ratio term of ORPO (Hong et al. 2024, arXiv:2403.07691), of an answer's mean log-probability."""
    scale = 1.0 / np.maximum(lengths, 1)
    means = np.minimum(policy * scale, -1e-12)  # the odds of probability 1 are infinite
    rest = -np.expm1(means)  # 1 - p
    odds = means - np.log(rest)
    margin = odds[:, 0] - odds[:, 1]
    slope = -beta * sigmoid(-margin)
    return UnitLosses(beta * np.logaddexp(0.0, -margin), slope[:, None] * [1.0, -1.0] / rest * scale)


def kto(ratios: np.ndarray, desirable: np.ndarray, divergence: float, beta: float, weights: np.ndarray) -> UnitLosses:
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306, equation 7).

    Args:
        ratios: (units,) policy - reference of the answers.
        desirable: bool (units,).
        divergence: Mean of policy - reference over answers of other prompts, at least 0; it has no gradient.
        weights: (units,) factors of the losses.
    """
    sign = np.where(desirable, 1.0, -1.0)
    value = sigmoid(beta * sign * (ratios - divergence))
    slopes = np.zeros((len(ratios), 2))
    slopes[:, 0] = -weights * beta * sign * value * (1 - value)
    return UnitLosses(weights * (1 - value), slopes)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))

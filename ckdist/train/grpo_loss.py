"""The loss of GRPO (Shao et al. 2024, arXiv:2402.03300) by tokens' log-probabilities, with derivatives."""

from typing import NamedTuple

import numpy as np

LEAST_DEVIATION = 1e-4  # added to the deviation of a group's rewards, as in TRL


class TokenLosses(NamedTuple):
    """Losses of tokens. All arrays are float64 (tokens,)."""

    losses: np.ndarray
    slopes: np.ndarray  # d loss / d log-probability
    divergences: np.ndarray  # from the reference; 0 without one
    is_clipped: np.ndarray  # bool


def advantages(rewards: np.ndarray) -> np.ndarray:
    """(reward - mean) / deviation within each group. `rewards`: (groups, samples)."""
    apart = rewards - rewards.mean(axis=1, keepdims=True)
    return apart / (rewards.std(axis=1, keepdims=True, ddof=1) + LEAST_DEVIATION)


def grpo(
    policy: np.ndarray, before: np.ndarray, reference: np.ndarray | None, gains: np.ndarray, epsilon: float, kl: float
) -> TokenLosses:
    """The clipped objective, and `kl` times the divergence from the reference.

    Args:
        policy: Log-probabilities, float64 (tokens,).
        before: Those of the weights that the tokens were sampled from.
        reference: Those of the model before training. None: no divergence.
        gains: The advantage of each token's sequence.
        epsilon: A ratio beyond 1 - epsilon or 1 + epsilon is clipped.
    """
    ratio = np.exp(policy - before)
    free, clipped = ratio * gains, np.clip(ratio, 1 - epsilon, 1 + epsilon) * gains
    is_clipped = clipped < free
    losses, slopes = -np.minimum(free, clipped), np.where(is_clipped, 0.0, -free)
    divergences = np.zeros(len(policy))
    if reference is not None:
        apart = reference - policy
        divergences = np.exp(apart) - apart - 1
        losses, slopes = losses + kl * divergences, slopes + kl * (1 - np.exp(apart))
    return TokenLosses(losses, slopes, divergences, is_clipped)

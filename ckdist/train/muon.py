"""Muon (Jordan et al. 2024): the update of a matrix is its momentum with all singular values near 1.

Rates are those of AdamW: an update is scaled by 0.2 * sqrt(max(rows, columns)) (Liu et al. 2025, arXiv:2502.16982).
"""

import math

import numpy as np

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the polynomial of Newton-Schulz, chosen for few iterations
ITERATIONS, EPSILON = 5, 1e-7
NOT_MATRICES = ("embed_tokens.weight", "lm_head.weight")  # tables: a row is a token


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """True if Muon updates this weight. AdamW updates the others."""
    return len(shape) == 2 and not name.endswith(NOT_MATRICES)


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    """The matrix with singular values near 1, by five iterations of Newton-Schulz in float32."""
    a, b, c = (np.float32(number) for number in COEFFICIENTS)
    x = matrix / np.float32(max(float(np.linalg.norm(matrix)), EPSILON))
    wide = x if len(x) <= x.shape[1] else x.T
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    return wide if len(x) <= x.shape[1] else wide.T


def update_floats(rows: int, columns: int) -> int:
    """Floats of the arrays of `update`."""
    return 6 * rows * columns + 3 * min(rows, columns) ** 2


def update(
    values: np.ndarray, gradient: np.ndarray, momentum: np.ndarray, scale: float, rate: float, beta: float, decay: float
) -> None:
    """Updates one matrix.

    Args:
        momentum: The running mean of the gradients, (elements,).
        scale: Factor of the gradient.
        rate: The learning rate.
        beta: Decay of the running mean.
        decay: A step multiplies the matrix by 1 - rate * decay.
    """
    scaled, mean = gradient * np.float32(scale), momentum.reshape(values.shape)
    mean += np.float32(1 - beta) * (scaled - mean)
    found = orthogonal(scaled + np.float32(beta) * (mean - scaled))  # Nesterov's momentum
    step = rate * 0.2 * math.sqrt(max(values.shape))
    values[...] = np.float32(1 - rate * decay) * values - np.float32(step) * found

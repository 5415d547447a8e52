"""Muon (Jordan et al. 2024): the update of a matrix is its momentum with all singular values near 1.

Rates are those of AdamW: an update is scaled by 0.2 * sqrt(max(rows, columns)) (Liu et al. 2025, arXiv:2502.16982).
"""

import math

import numpy as np

from ckdist.comm.communicator import Communicator
from ckdist.train.arena import Arena

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


def update(
    parameters: Arena,
    gradients: Arena,
    momentum: Arena,
    scale: float,
    rate: float,
    beta: float,
    decay: float,
    replicas: Communicator | None,
) -> None:
    """Updates all matrices. Each replica computes every n-th of them and sends it to the others, so all are equal.

    Args:
        momentum: Running means of the gradients.
        scale: Factor of the gradients.
        rate: The learning rate.
        beta: Decay of the running mean.
        decay: A step multiplies matrices by 1 - rate * decay.
        replicas: The ranks that hold the same matrices.
    """
    names = [name for name, shape in parameters.shapes.items() if is_matrix(name, shape)]
    size, own = (1, 0) if replicas is None else (replicas.size, replicas.rank)
    for first in range(0, len(names), size):
        group = names[first : first + size]
        found = {name: np.zeros(parameters.shapes[name], np.float32) for name in group}
        for index, name in enumerate(group):
            gradient, mean = gradients[name] * np.float32(scale), momentum[name]
            mean += np.float32(1 - beta) * (gradient - mean)
            if index == own:  # Nesterov's momentum
                found[name] = orthogonal(gradient + np.float32(beta) * (mean - gradient))
        for name, array in found.items():
            whole = array if replicas is None else replicas.all_reduce(np.ascontiguousarray(array))
            step = rate * 0.2 * math.sqrt(max(array.shape))
            parameters[name][...] = np.float32(1 - rate * decay) * parameters[name] - np.float32(step) * whole

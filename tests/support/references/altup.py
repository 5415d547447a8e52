"""The definitions in numpy of the ops in `ckdist/program/ops/altup.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.rms_norm import inverse_rms


def _coefficients(v: np.ndarray, weights: Arrays, eps: float) -> np.ndarray:
    """Returns coefs * tanh(router * rms_norm(v) / width): (tokens, rows of coefs)."""
    norm, router, coefs = weights[:3]
    router = router.reshape(-1, v.shape[-1])
    modalities = np.tanh((v * inverse_rms(v, eps) * norm) @ router.T / np.float32(v.shape[-1]))
    return modalities @ coefs.reshape(-1, len(router)).T


@reference("altup_predict")
def altup_predict(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """x[j] + sum over i of c[j, i] * x[i]. Baykal et al. 2023, arXiv:2301.13310, algorithm 1. It has no gradient."""
    c = _coefficients(inputs[0], weights, attrs["eps"]).reshape(-1, len(inputs), len(inputs))
    x = np.stack(inputs, axis=1)  # (tokens, streams, width)
    return list((x + c @ x).swapaxes(0, 1))


@reference("altup_correct")
def altup_correct(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """x[j] + (1 + c[j]) * (y - x[0]), then the first of these times a weight. It has no gradient."""
    *x, y = inputs
    c = _coefficients(y, weights, attrs["eps"])
    corrected = [one + (1 + c[:, j : j + 1]) * (y - x[0]) for j, one in enumerate(x)]
    return [*corrected, corrected[0] * weights[3]]


@reference("match_rms")
def match_rms(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The first operand, and each other one times rms(first) / rms(it); with `mean` their mean. It has no gradient."""
    first, *others = inputs
    square = lambda x: np.mean(x * x, axis=-1, keepdims=True)
    size = np.sqrt(square(first))
    matched = [first, *(x * size / np.sqrt(np.maximum(square(x), np.float32(attrs["least"]))) for x in others)]
    return [np.mean(matched, axis=0)] if attrs.get("mean") else matched

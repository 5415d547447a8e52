"""The definitions in numpy of the ops in `ckdist/program/ops/layer_norm.py`."""

import numpy as np

from ckdist.program.ops.op_types import Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("layer_norm")
def layer_norm(
    context: RankContext, inputs: list[np.ndarray], weights: list[np.ndarray | None], attrs: Attrs
) -> list[np.ndarray]:
    """(x - mean(x)) / sqrt(var(x) + eps) * w (+ b). Ba et al. 2016, arXiv:1607.06450."""
    (x,), (w, bias) = inputs, weights
    assert w is not None  # only the bias is optional
    centred = x - x.mean(axis=-1, keepdims=True)
    y = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + np.float32(attrs["eps"])) * w
    return [y if bias is None else y + bias]

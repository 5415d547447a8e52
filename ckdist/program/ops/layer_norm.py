"""layer_norm, which encoders use in place of rms_norm. It has no step of its own: the reader's step computes it."""

import numpy as np

from ckdist.errors import LayoutError
from ckdist.program.ops.op import op, unsharded
from ckdist.program.ops.op_types import Attrs, Inferred, RankContext, Values, Weights


def infer_layer_norm(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x. Raises LayoutError if the weight has another size."""
    x, w = inputs[0], weights[0]
    unsharded("layer_norm", x)
    if w.dims[-1].elements != x.dims[-1].elements:
        raise LayoutError(f"layer_norm of {x.dims[-1].elements} elements has a weight of {w.dims[-1].elements}: {w}")
    return [(x.dims, None)]


@op("layer_norm", infer_layer_norm)
def layer_norm(
    context: RankContext, inputs: list[np.ndarray], weights: list[np.ndarray | None], attrs: Attrs
) -> list[np.ndarray]:
    """(x - mean(x)) / sqrt(var(x) + eps) * w (+ b). Ba et al. 2016, arXiv:1607.06450."""
    (x,), (w, bias) = inputs, weights
    assert w is not None  # only the bias is optional
    centred = x - x.mean(axis=-1, keepdims=True)
    y = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + np.float32(attrs["eps"])) * w
    return [y if bias is None else y + bias]

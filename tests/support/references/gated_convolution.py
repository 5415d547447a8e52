"""The definitions in numpy of the ops in `ckdist/program/ops/gated_convolution.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference, total


@reference("gated_conv")
def gated_conv(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns c * (bias + sum over i of w[:, i] * (b * x)[t - taps + 1 + i]), with zeros before the sequence."""
    b, c, x = inputs
    kernel, *bias = weights
    taps = attrs["weights"][0].dims[0].width // attrs["inputs"][2].dims[-1].width
    kernel, place = kernel.reshape(x.shape[1], taps), (attrs["layer"], "x")  # (channels, taps)
    tail = context.states.get(place, np.zeros((taps - 1, x.shape[1]), x.dtype))
    rows = np.concatenate([tail, b * x])  # (taps - 1 + tokens, channels)
    context.states[place] = rows[len(rows) - taps + 1 :]
    result = total(rows[i : i + len(x)] * kernel[:, i] for i in range(taps))
    return [c * (result + bias[0] if bias else result)]

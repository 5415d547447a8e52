"""The definitions in numpy of the ops in `ckdist/program/ops/layer_inputs.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.rms_norm import inverse_rms


@reference("layer_inputs")
def layer_inputs(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """(rms_norm(x * x_factor) + row * row_factor) * factor for each layer, with the table's row of each token."""
    (ids, x), (table, norm) = inputs, weights
    factor = {name: np.float32(attrs[name]) for name in ("x_factor", "row_factor", "factor")}
    rows = table[np.where((ids >= 0) & (ids < len(table)), ids, 0)].reshape(-1, len(norm))  # (tokens * layers, width)
    parts = x.reshape(rows.shape) * factor["x_factor"]
    parts = (parts * inverse_rms(parts, attrs["eps"]) * norm + rows * factor["row_factor"]) * factor["factor"]
    return list(parts.reshape(len(x), -1, len(norm)).transpose(1, 0, 2))


@reference("scale_by")
def scale_by(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x * w, with a weight of one element. The step that reads the sum computes it."""
    return [inputs[0] * weights[0]]


@reference("sum_rows")
def sum_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """(rms_norm(y) (+ x)) * factor."""
    y, *x = inputs
    total = y * inverse_rms(y, attrs["eps"]) * weights[0] + (x[0] if x else np.float32(0))
    return [total * np.float32(attrs.get("factor", 1.0))]

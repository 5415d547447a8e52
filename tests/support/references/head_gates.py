"""The definitions in numpy of the ops in `ckdist/program/ops/head_gates.py`."""

import numpy as np

from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference
from tests.support.references.elementwise import gated


@reference("gated_heads")
def gated_heads(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """f(gate of the head) * up. It has no gradient: models with gated attention are served only."""
    gate, up = inputs
    return gated(context, [np.repeat(gate, up.shape[-1] // max(gate.shape[-1], 1), axis=-1), up], weights, attrs)

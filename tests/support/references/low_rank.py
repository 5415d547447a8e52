"""The definitions in numpy of the ops in `ckdist/program/ops/low_rank.py`."""

import numpy as np

from ckdist.program.ops.low_rank import _parts
from ckdist.program.ops.op_types import Arrays, Attrs
from tests.support.rank_context import RankContext
from tests.support.references import reference


@reference("low_rank")
def low_rank(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns y + scale * (x @ a.T) @ b.T for each result y of a linear. arXiv:2106.09685.

    If x is sharded, both summands are partial. With keys of dropout, each A reads x with a mask of its own.
    """
    x, ys, keys = _parts(inputs, attrs)
    pairs = zip(ys, weights[::2], weights[1::2], strict=True)
    reads = [x] * len(ys)
    if keys:
        from ckdist.program.ops.dropout import dropped, stream_of

        matrices = attrs["weights"][::2]
        mask = {"probability": attrs["dropout"]}
        first = matrices[0].dims[1].span(context.mesh)[0]
        reads = [dropped(x, keys[0], mask | {"stream": stream_of(a.name)}, first) for a in matrices]
    return [y + np.float32(attrs["scale"]) * ((x @ a.T) @ b.T) for x, (y, a, b) in zip(reads, pairs, strict=True)]

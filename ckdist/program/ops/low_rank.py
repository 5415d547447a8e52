"""low_rank: what the matrices of LoRA add to a linear's values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ckdist.errors import LayoutError
from ckdist.layout import Range
from ckdist.program.lowered import RANK_UNIT
from ckdist.program.ops.elementwise import GATES
from ckdist.program.ops.op import Arrays, Attrs, Inferred, Values, Weights, op, whole
from ckdist.program.program import Instr, Weight
from ckdist.program.rank_context import RankContext
from ckdist.program.step import ABSENT, NO_SPAN, Span, VectorIndex

if TYPE_CHECKING:  # which import the ops
    from ckdist.program.lower import Lowering


def infer_low_rank(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """As the values that it adds to; LayoutError where A and B do not lead there."""
    x, *ys = inputs
    whole("low_rank", x)
    for y, a, b in zip(ys, weights[: len(ys)], weights[len(ys) :], strict=True):
        if (a.dims[1], a.dims[0], b.dims[0]) != (x.dims[-1], b.dims[1], y.dims[-1]):
            raise LayoutError(
                f"low_rank: {a} and {b} do not lead from [{x.dims[-1]}] of %{x.name} to [{y.dims[-1]}] of %{y.name}"
            )
        if a.dims[1].axis != y.partial:
            raise LayoutError(
                f"low_rank adds what is partial over {a.dims[1].axis} to %{y.name}, which is partial over {y.partial}"
            )
    return [(y.dims, y.partial) for y in ys]


@op("low_rank", infer_low_rank)
def low_rank(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Y + scale * (x @ a.T) @ b.T for each y: LoRA beside a linear of x.

    Where x is sharded, it adds a part to a part. arXiv:2106.09685.
    """
    x, *ys = inputs
    pairs = zip(ys, weights[: len(ys)], weights[len(ys) :], strict=True)
    return [y + np.float32(attrs["scale"]) * ((x @ a.T) @ b.T) for y, a, b in pairs]


@dataclass(frozen=True)
class Low:
    """x A, one buffer for each shard of x's columns, on its way to y + x A B."""

    values: Span
    b: Weight

    def matrices(self, lowering: "Lowering", rows: list[Range]) -> Span:
        """B, cut into the same rows as the matrix that it adds to."""
        return lowering.matrix([(self.b.name, part, (0, padded(self.b.dims[1].elements))) for part in rows])


def lower_low_rank(lowering: "Lowering", linear: Instr, instr: Instr) -> dict[str, Low]:
    """A step for all A, before the linear's own, which adds what they made times B. By the linear's weights."""
    x, count = instr.inputs[0], len(instr.outputs)
    weights = [instr.weight(index) for index in range(2 * count)]
    of = {v.name: w.name for v, w in zip(linear.outputs, linear.matrices, strict=True)}
    columns, products, found = lowering.columns(x), [], {}
    for value, a, b in zip(instr.inputs[1:], weights[:count], weights[count:], strict=True):
        rows = padded(a.dims[0].elements)
        spans = lowering.activations(x, a.name).indices()
        lows = [lowering.buffer("arena", rows, rows=lowering.most_rows(x), selected=x.selected) for _ in columns]
        for span, low, part in zip(spans, lows, columns, strict=True):
            products.append(
                {
                    "x": Span(span, 1),
                    "out": low,
                    "weight": lowering.matrix([(a.name, (0, rows), part)]),
                    "bias": VectorIndex(ABSENT),
                    "low": NO_SPAN,
                    "low_weight": NO_SPAN,
                }
            )
        found[of[value.name]] = Low(Span(lows[0], len(lows)), b)
    lowering.emit(
        "linear", x.rows, count=len(products), products=products, summed=False, gate=GATES["none"], soft_cap=0.0
    )
    return found


def padded(rank: int) -> int:
    """A rank with the zeros up to whole units."""
    return -(-rank // RANK_UNIT) * RANK_UNIT

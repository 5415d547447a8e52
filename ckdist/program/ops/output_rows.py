"""output_rows: hidden states of the selected tokens, which leave the program in place of logits."""

from typing import TYPE_CHECKING

from ckdist.program.ops.op import Arrays, Attrs, lower, op, unchanged_whole
from ckdist.program.rank_context import RankContext

if TYPE_CHECKING:  # which import the ops
    from ckdist.program.fusion import Group
    from ckdist.program.lower import Lowering


@op("output_rows", unchanged_whole("output_rows"))
def output_rows(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """The same."""
    return inputs


@lower("output_rows", "inference")
def lower_output_rows(lowering: "Lowering", group: "Group") -> None:
    """A step, with the norm and the residual that make the rows."""
    (x,) = group.instr.inputs
    source, norm = lowering.normed(x)
    out = lowering.buffer("hidden", x.dims[-1].elements)
    lowering.emit("output_rows", x.rows, **source.fields(), **norm, out=out)

"""The gradients of soft_cap, gated and select_rows."""

from typing import TYPE_CHECKING

from ckdist.errors import LayoutError
from ckdist.program.ops.elementwise import GATES
from ckdist.program.ops.op import lower, op, unchanged_whole, whole
from ckdist.program.ops.op_types import Attrs, Inferred, Values, Weights
from ckdist.program.program import Instr

if TYPE_CHECKING:  # these modules import the ops
    from ckdist.program.lower_training import TrainingLowering


op("soft_cap_grad", unchanged_whole("soft_cap_grad"))


def infer_gated_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of the operands, twice."""
    return unchanged_whole("gated_grad")(inputs, weights, attrs) * 2


op("gated_grad", infer_gated_grad)


@lower("gated_grad", "training")
def lower_gated_grad(lowering: "TrainingLowering", instr: Instr) -> None:
    """Emits one step."""
    gate, up, dy = map(lowering.place_of, instr.inputs)
    d_gate, d_up = map(lowering.output, instr.outputs)
    function = GATES[instr.attrs["function"]]
    lowering.emit("gated_grad", gate=gate, up=up, dy=dy, d_gate=d_gate, d_up=d_up, function=function)


def infer_select_rows_grad(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The same dims, with tokens in place of outputs. Raises LayoutError if tokens are sharded."""
    whole("select_rows_grad", inputs[0])
    if attrs["dim"].axis:
        dim = attrs["dim"]
        raise LayoutError(f"select_rows_grad needs all of {dim.name}, but it is sharded over {dim.axis}")
    return [((attrs["dim"], *inputs[0].dims[1:]), None)]


op("select_rows_grad", infer_select_rows_grad)

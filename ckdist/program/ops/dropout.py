"""dropout: sets random elements of a linear's input to zero before LoRA's A reads it (Srivastava et al. 2014).

Whether an element is kept is a hash of its token's key, of the linear and of the column. So a mask is computed again in
the backward pass, and does not depend on the ranks.
"""

import zlib
from typing import TYPE_CHECKING, Any

from ckdist.layout import Dim
from ckdist.mesh import Mesh
from ckdist.program.ops.op import lower, op, whole
from ckdist.program.ops.op_types import Attrs, Inferred, Values, Weights
from ckdist.program.program import Instr

if TYPE_CHECKING:  # this module imports the ops
    from ckdist.program.lower_training import TrainingLowering


def stream_of(name: str) -> int:
    """The number of a linear's masks, from the name of its A."""
    return zlib.crc32(name.encode())


def threshold(probability: float) -> int:
    """The least hash, of 32 bits, of an element that is kept."""
    return min(round(probability * 2**32), 2**32 - 1)


def infer_dropout(inputs: Values, weights: Weights, attrs: Attrs) -> Inferred:
    """The dims of x."""
    whole("dropout", *inputs)
    return [(inputs[0].dims, None)]


op("dropout", infer_dropout)


def step_fields(probability: float, stream: int, columns: Dim, mesh: Mesh) -> dict[str, Any]:
    """The fields of a step that do not depend on its values."""
    first = columns.span(mesh)[0]
    return {"stream": stream, "least": threshold(probability), "factor": 1 / (1 - probability), "first_column": first}


@lower("dropout", "training")
def lower_dropout(lowering: "TrainingLowering", instr: Instr) -> None:
    """Emits one step."""
    fields = step_fields(instr.attrs["probability"], instr.attrs["stream"], instr.inputs[0].dims[-1], lowering.mesh)
    x = lowering.place_of(instr.inputs[0])
    lowering.emit("dropout", x=x, out=lowering.output(instr.outputs[0]), **fields)

"""dropout: sets random elements of a linear's input to zero before LoRA's A reads it (Srivastava et al. 2014).

Whether an element is kept is a hash of its token's key, of the linear and of the column. So a mask is computed again in
the backward pass, and does not depend on the ranks.
"""

import zlib
from typing import Any

import numpy as np

from ckdist.layout import Dim
from ckdist.mesh import Mesh
from ckdist.program.ops.op import TrainingLowering, lower, op, unchanged
from ckdist.program.ops.op_types import Arrays, Attrs, RankContext
from ckdist.program.program import Instr

COLUMN = 0x9E3779B9


def stream_of(name: str) -> int:
    """The number of a linear's masks, from the name of its A."""
    return zlib.crc32(name.encode())


def is_kept(keys: np.ndarray, stream: int, columns: np.ndarray, probability: float) -> np.ndarray:
    """Bool (tokens, columns): True for the elements that are kept. `keys`: uint32 (tokens,)."""
    rows = _mixed(keys.astype(np.uint32) ^ np.uint32(stream))
    return _mixed(rows[:, None] + columns.astype(np.uint32) * np.uint32(COLUMN)) >= np.uint32(_threshold(probability))


def _threshold(probability: float) -> int:
    return min(round(probability * 2**32), 2**32 - 1)


def _mixed(x: np.ndarray) -> np.ndarray:
    """A hash of 32 bits to 32 bits."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


@op("dropout", unchanged)
def dropout(context: RankContext, inputs: Arrays, weights: Arrays, attrs: Attrs) -> Arrays:
    """Returns x / (1 - probability) where an element is kept, else 0; x if there are no keys."""
    x, keys = inputs
    return [dropped(x, keys, attrs, attrs["columns"].span(context.mesh)[0])]


def dropped(x: np.ndarray, keys: np.ndarray | None, attrs: Attrs, first: int) -> np.ndarray:
    """`dropout` of columns that begin with number `first`. The attributes are those of the op."""
    if keys is None:
        return x
    kept = is_kept(keys, attrs["stream"], first + np.arange(x.shape[1]), attrs["probability"])
    return np.where(kept, x * np.float32(1 / (1 - attrs["probability"])), np.float32(0))


def step_fields(probability: float, stream: int, columns: Dim, mesh: Mesh) -> dict[str, Any]:
    """The fields of a step that do not depend on its values."""
    first = columns.span(mesh)[0]
    return {"stream": stream, "least": _threshold(probability), "factor": 1 / (1 - probability), "first_column": first}


@lower("dropout", "training")
def lower_dropout(lowering: TrainingLowering, instr: Instr) -> None:
    fields = step_fields(instr.attrs["probability"], instr.attrs["stream"], instr.inputs[0].dims[-1], lowering.mesh)
    x = lowering.place_of(instr.inputs[0])
    lowering.emit("dropout", x=x, out=lowering.output(instr.outputs[0]), **fields)

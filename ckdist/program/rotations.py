"""The rotations of positions: `enum ckdist_rope_table` by name, and the tables of cosines and sines."""

from typing import Any

import numpy as np

from ckdist import native
from ckdist.program.model_shape import ModelShape, Rotation

ROPE_TABLES = native.numbers("ckdist_rope_table", "ckdist_rope_")
NO_ROPE = ROPE_TABLES.pop("none")
_ROWS = 4096  # rows computed at a time, so that temporary arrays stay small for a long context


def rope_bytes_per_position(spec: ModelShape) -> int:
    """Bytes of cosines and sines for one position, in all tables of the model."""
    return sum(8 * len(rope.inverse_frequencies) for rope in spec.ropes.values())


def rope_fields(rope: Rotation | None, positions: int) -> dict[str, Any]:
    """The fields of a `struct ckdist_rope`. Cosines and sines are float32 (positions, dims / 2)."""
    if rope is None:
        return {}
    half = len(rope.inverse_frequencies)
    cos, sin = np.empty((positions, half), np.float32), np.empty((positions, half), np.float32)
    for begin in range(0, positions, _ROWS):
        rows = np.arange(begin, min(begin + _ROWS, positions), dtype=np.float32)
        angles = rows[:, None] * rope.inverse_frequencies.astype(np.float32)
        for table, function in ((cos, np.cos), (sin, np.sin)):
            np.multiply(function(angles), np.float32(rope.magnitude), out=table[begin : begin + _ROWS])
    # a pointer is null if it is absent
    axes = {"axes": np.array(rope.axes, np.int32)} if rope.axes else {}
    return {"cos": cos, "sin": sin, "dims": 2 * half, "interleaved": rope.interleaved, **axes}

"""Handles of planned matrices and vectors. Their addresses are valid once the loader is open.

A handle keeps its loader alive, and so the weights.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from ckdist.native import address, ffi, lib

if TYPE_CHECKING:
    from ckdist.weights.loader import ShardLoader


class MatrixHandle:
    """One planned matrix: rows x cols, packed as `type` (ggml number)."""

    def __init__(self, loader: "ShardLoader", index: int, type_number: int, rows: int, columns: tuple[int, int]):
        self._loader = loader  # keeps the arena alive
        self._index = index
        self.type = type_number
        self.rows = rows
        self.columns = columns
        self.cols = columns[1] - columns[0]

    @property
    def address(self) -> int:
        """Address of the native `struct ckdist_matrix`."""
        return address(self._struct())

    @property
    def bytes(self) -> int:
        """Bytes of its tiles in the arena."""
        matrix = self._struct()
        return (matrix.rows + 15) // 16 * matrix.tile_bytes

    @property
    def place(self) -> list[int]:
        """[type, rows, columns, bytes of a tile, arena offset of the tiles, arena offset of their states].

        Another rank that maps the arena needs these.
        """
        matrix = self._struct()
        states = lib.ckdist_loader_states_offset(self._loader.native_open(), self._index)
        return [matrix.type, matrix.rows, matrix.cols, matrix.tile_bytes, self._loader.offset_of(matrix.tiles), states]

    def _struct(self) -> Any:
        return lib.ckdist_loader_matrix(self._loader.native_open(), self._index)


class VectorHandle:
    """One planned vector of `size` float32."""

    def __init__(self, loader: "ShardLoader", index: int, size: int):
        self._loader = loader
        self._index = index
        self.size = size
        self.bytes = 4 * size

    @property
    def address(self) -> int:
        """Address of its first float."""
        return address(self._pointer())

    @property
    def place(self) -> int:
        """Its offset in the arena."""
        return self._loader.offset_of(self._pointer())

    def numpy(self) -> np.ndarray:
        """A copy, float32 (size,)."""
        return np.frombuffer(bytearray(ffi.buffer(self._pointer(), self.bytes)), np.float32)

    def _pointer(self) -> Any:
        return lib.ckdist_loader_vector(self._loader.native_open(), self._index)

"""Matrices of LoRA adapters, packed for the kernels in float32 in this process's memory."""

import numpy as np

from ckdist.layout import Range
from ckdist.native import address, call, ffi, lib, struct
from ckdist.weights.dtypes import F32

CACHE_LINE = 64
TILE_ROWS = 16


class PackedMatrix:
    """A float32 matrix (rows, cols), or a stack of matrices, packed into tiles. It has the interface of a MatrixHandle.

    Each matrix of a stack begins a new tile.
    """

    type = F32.number

    def __init__(self, values: np.ndarray):
        rows = -(-values.shape[-2] // TILE_ROWS) * TILE_ROWS
        if values.ndim > 2:
            count, there, columns = values.shape
            values = np.pad(values, [(0, 0), (0, rows - there), (0, 0)]).reshape(count * rows, columns)
        self.rows, self.cols = values.shape
        tile_bytes = call(lib.ckdist_tile_bytes, None, self.type, self.cols)
        self.bytes = -(-self.rows // 16) * tile_bytes
        memory = np.zeros(self.bytes + CACHE_LINE, np.uint8)
        shift = -memory.ctypes.data % CACHE_LINE
        tiles = memory[shift : shift + self.bytes]
        source = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
        call(lib.ckdist_pack, None, self.type, self.rows, self.cols, source, source.nbytes, tiles, self.bytes)
        self.native = struct(
            "ckdist_matrix", type=self.type, rows=self.rows, cols=self.cols, tile_bytes=tile_bytes, tiles=tiles
        )

    @property
    def address(self) -> int:
        """Address of the native `struct ckdist_matrix`."""
        return address(self.native)


class SlotMatrix:
    """The place of a matrix of at most (rows, cols) that adapters take in turn. It is empty at first."""

    type = F32.number

    def __init__(self, rows: int, cols: int) -> None:
        self.rows, self.cols = rows, cols
        self.bytes = -(-rows // TILE_ROWS) * call(lib.ckdist_tile_bytes, None, self.type, cols)
        self._struct = struct("ckdist_matrix", type=self.type)
        self._held: PackedMatrix | None = None

    @property
    def address(self) -> int:
        """Address of the native `struct ckdist_matrix`."""
        return address(self._struct)

    def hold(self, matrix: PackedMatrix | None) -> None:
        """Replaces the matrix. No step under way may read it."""
        empty = struct("ckdist_matrix", type=self.type)
        ffi.memmove(self._struct, empty if matrix is None else matrix.native, ffi.sizeof("struct ckdist_matrix"))
        self._held = matrix


def pack_part(tensor: np.ndarray, rows: Range, columns: Range) -> PackedMatrix:
    """Packs rows and columns of a matrix, or of each matrix in a stack. Elements beyond its end are zeros."""
    part = tensor[..., slice(*rows), slice(*columns)]
    ends = zip((rows, columns), part.shape[-2:], strict=True)
    missing = [(0, 0)] * (part.ndim - 2) + [(0, end - begin - n) for (begin, end), n in ends]
    return PackedMatrix(np.pad(part, missing))


def is_low_rank(name: str) -> bool:
    """Whether a matrix of a lowered program belongs to an adapter, not to the model."""
    return ".lora_" in name

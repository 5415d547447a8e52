"""Matrices of LoRA adapters, packed for the kernels in float32 or float16 in this process's memory."""

import contextlib
import mmap
from collections.abc import Sequence

import numpy as np

from ckdist.layout import Range
from ckdist.native import address, call, ffi, lib, struct
from ckdist.weights.dtypes import F16, F32

CACHE_LINE = 64
HUGE_PAGE = 2 << 20
TILE_ROWS = 16


class PackedMatrix:
    """A matrix (rows, cols), or a stack of matrices, packed into tiles. It has the interface of a MatrixHandle.

    Each matrix of a stack begins a new tile.

    Args:
        memory: Takes the tiles at its start. None: memory of its own.
    """

    type = F32.number  # of the activations' format, which float16 shares

    def __init__(self, values: np.ndarray, memory: np.ndarray | None = None):
        rows = -(-values.shape[-2] // TILE_ROWS) * TILE_ROWS
        if values.ndim > 2:
            count, there, columns = values.shape
            values = np.pad(values, [(0, 0), (0, rows - there), (0, 0)]).reshape(count * rows, columns)
        self.rows, self.cols = values.shape
        self.type = _type_of(values)
        self.bytes = packed_bytes(self.type, self.rows, self.cols)
        if memory is None:
            memory = _aligned(np.zeros(self.bytes + CACHE_LINE, np.uint8), CACHE_LINE)
        tiles = memory[: self.bytes]
        source = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        call(lib.ckdist_pack, None, self.type, self.rows, self.cols, source, source.nbytes, tiles, self.bytes)
        tile_bytes = packed_bytes(self.type, TILE_ROWS, self.cols)
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
        self.bytes = packed_bytes(self.type, rows, cols)
        self._struct = struct("ckdist_matrix", type=self.type)
        self._held: PackedMatrix | None = None

    @property
    def address(self) -> int:
        """Address of the native `struct ckdist_matrix`."""
        return address(self._struct)

    def hold(self, matrix: PackedMatrix | None, scale: float) -> None:
        """Replaces the matrix, and the scale of its products. No step under way may read it."""
        empty = struct("ckdist_matrix", type=self.type)
        ffi.memmove(self._struct, empty if matrix is None else matrix.native, ffi.sizeof("struct ckdist_matrix"))
        self._struct.scale = scale
        self._held = matrix


def packed_bytes(number: int, rows: int, cols: int) -> int:
    """Bytes of a packed matrix of the type with ggml's `number`."""
    return -(-rows // TILE_ROWS) * call(lib.ckdist_tile_bytes, None, number, cols)


def part_of(tensor: np.ndarray, rows: Range, columns: Range) -> np.ndarray:
    """Rows and columns of a matrix, or of each matrix in a stack. Elements beyond its end are zeros."""
    part = tensor[..., slice(*rows), slice(*columns)]
    ends = zip((rows, columns), part.shape[-2:], strict=True)
    missing = [(0, 0)] * (part.ndim - 2) + [(0, end - begin - n) for (begin, end), n in ends]
    return np.pad(part, missing)


def pack_together(parts: Sequence[np.ndarray]) -> list[PackedMatrix]:
    """Packs matrices one after another, in huge pages: steps that read them in this order are faster by a fifth."""
    sizes = [packed_bytes(_type_of(part), *part.shape) for part in parts]
    pages = mmap.mmap(-1, sum(sizes) + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = _aligned(np.frombuffer(pages, np.uint8), HUGE_PAGE)
    begins = np.cumsum([0, *sizes])
    return [PackedMatrix(part, memory[begin:]) for part, begin in zip(parts, begins, strict=False)]


def _type_of(values: np.ndarray) -> int:
    return (F16 if values.dtype == np.float16 else F32).number


def _aligned(memory: np.ndarray, unit: int) -> np.ndarray:
    return memory[-memory.ctypes.data % unit :]

"""An adapter's matrices as a replay multiplies with them: packed in float32, in this process's memory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.native import check, ffi, lib
from ckdist.program.lowered import RANK_UNIT
from ckdist.program.program import Program
from ckdist.weights.dtypes import F32
from ckdist.weights.lora import load_adapter

CACHE_LINE = 64


class PackedMatrix:
    """float32 (rows, cols) as tiles; what stands for a loader's MatrixHandle."""

    type = F32.number

    def __init__(self, values: np.ndarray):
        self.rows, self.cols = values.shape
        tile_bytes = lib.ckdist_tile_bytes(ffi.NULL, self.type, self.cols)
        self.bytes = -(-self.rows // 16) * tile_bytes
        self._memory = np.zeros(self.bytes + CACHE_LINE, np.uint8)
        shift = -self._memory.ctypes.data % CACHE_LINE
        tiles, source = self._memory[shift : shift + self.bytes], np.ascontiguousarray(values, np.float32)
        address = ffi.cast("uint8_t *", tiles.ctypes.data)
        check(
            lib.ckdist_pack(
                ffi.NULL,
                self.type,
                self.rows,
                self.cols,
                ffi.cast("uint8_t *", source.ctypes.data),
                source.nbytes,
                address,
                self.bytes,
            )
        )
        self._struct = ffi.new(
            "struct ckdist_matrix *",
            {"type": self.type, "rows": self.rows, "cols": self.cols, "tile_bytes": tile_bytes, "tiles": address},
        )

    @property
    def address(self) -> int:
        """Of the native `struct ckdist_matrix`."""
        return int(ffi.cast("intptr_t", self._struct))


class Adapter:
    """The adapter in `folder`.

    `ranks` has the rank of each linear layer that it adds to; `factor` is what its products are multiplied by.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        lora, self._tensors = load_adapter(folder)
        self.factor = lora.scale
        self.ranks = {
            name.removesuffix(".lora_A.weight"): lora.rank for name in self._tensors if name.endswith(".lora_A.weight")
        }

    def check(self, program: Program) -> None:
        """ModelFileError unless `program` has all of the adapter's layers, in its sizes."""
        dims = {w.name: tuple(d.elements for d in w.dims) for w in program.weights}
        for name, tensor in self._tensors.items():
            if name not in dims:
                raise ModelFileError(
                    f"{self.folder} has {name}, and the model has no such layer: it was trained on another model"
                )
            if tensor.shape != dims[name]:
                raise ModelFileError(
                    f"{self.folder}: {name} has shape {list(tensor.shape)}, and the model needs {list(dims[name])}: "
                    "it was trained on another model"
                )

    def stacked(self, names: Sequence[str], columns: tuple[int, int]) -> PackedMatrix:
        """Columns [begin, end) of matrices A, one below the other, each with zeros up to whole units."""
        return PackedMatrix(np.concatenate([_padded(self._tensors[name][:, slice(*columns)], 0) for name in names]))

    def rows(self, name: str, rows: tuple[int, int]) -> PackedMatrix:
        """Rows [begin, end) of a matrix B, times the factor."""
        return PackedMatrix(_padded(self._tensors[name][slice(*rows)] * np.float32(self.factor), 1))


def _padded(values: np.ndarray, axis: int) -> np.ndarray:
    missing = [(0, 0), (0, 0)]
    missing[axis] = (0, -values.shape[axis] % RANK_UNIT)
    return np.pad(values, missing)


def is_low_rank(name: str | tuple[str, ...]) -> bool:
    """Whether a lowered program's matrix is an adapter's and not the model's."""
    return isinstance(name, tuple) or ".lora_" in name


__all__ = ["Adapter", "PackedMatrix", "is_low_rank"]

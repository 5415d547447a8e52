"""A LoRA adapter, packed for the kernels in float32 in this process's memory."""

from pathlib import Path

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models.spec import ModelSpec
from ckdist.native import address, call, lib, struct
from ckdist.program.lowered import MatrixKey
from ckdist.program.program import Program
from ckdist.program.tracer import LowRank
from ckdist.weights.adapter_file import load_adapter
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
        self._struct = struct(
            "ckdist_matrix", type=self.type, rows=self.rows, cols=self.cols, tile_bytes=tile_bytes, tiles=tiles
        )

    @property
    def address(self) -> int:
        """Address of the native `struct ckdist_matrix`."""
        return address(self._struct)


class Adapter:
    """The adapter of a model in `folder`.

    Attributes:
        low_rank: The linears with matrices, and their ranks.
        notes: Warnings for the user, one line each.
    """

    def __init__(self, folder: Path, spec: ModelSpec):
        self.folder = folder
        stored = load_adapter(folder, spec)
        self._tensors, self.notes = stored.matrices, stored.notes
        ranks = {
            name.removesuffix(".lora_A.weight"): array.shape[-2]
            for name, array in self._tensors.items()
            if name.endswith(".lora_A.weight")
        }
        self.low_rank = LowRank(lambda stem: ranks.get(stem, 0), scale=1.0)
        self._packed: dict[MatrixKey, PackedMatrix] = {}

    def check(self, program: Program) -> None:
        """Raises ModelFileError if `program` lacks a layer of the adapter, or has it in another size."""
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

    def matrix(self, key: MatrixKey) -> PackedMatrix:
        """Packs rows and columns of a matrix, or of each matrix in a stack. Elements beyond its end are zeros.

        A second call with the same key returns the same object.
        """
        if key not in self._packed:
            part = self._tensors[key.name][..., slice(*key.rows), slice(*key.columns)]
            if part.ndim > 2 and key.matrices is not None:
                part = part[slice(*key.matrices)]
            ends = zip((key.rows, key.columns), part.shape[-2:], strict=True)
            missing = [(0, 0)] * (part.ndim - 2) + [(0, end - begin - n) for (begin, end), n in ends]
            self._packed[key] = PackedMatrix(np.pad(part, missing))
        return self._packed[key]

    @property
    def bytes(self) -> int:
        """Bytes packed so far."""
        return sum(matrix.bytes for matrix in self._packed.values())


def is_low_rank(name: str) -> bool:
    """Whether a matrix of a lowered program belongs to an adapter, not to the model."""
    return ".lora_" in name

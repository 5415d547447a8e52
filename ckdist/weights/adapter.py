"""A LoRA adapter, packed for the kernels in float32 in this process's memory."""

from pathlib import Path

from ckdist.errors import ModelFileError
from ckdist.models.spec import ModelSpec
from ckdist.program.lowered import MatrixKey
from ckdist.program.program import Program
from ckdist.program.tracer import LowRank
from ckdist.weights.adapter_file import load_adapter
from ckdist.weights.packed_matrix import PackedMatrix, part_of


class Adapter:
    """The adapter of a model in `folder`.

    Attributes:
        low_rank: The linears with matrices, and their ranks.
        notes: Warnings for the user, one line each.
        head: The head of a reward model.
    """

    def __init__(self, folder: Path, spec: ModelSpec):
        self.folder = folder
        stored = load_adapter(folder, spec)
        self._tensors, self.notes, self.head = stored.matrices, stored.notes, stored.head
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
            tensor = self._tensors[key.name]
            if tensor.ndim > 2 and key.matrices is not None:
                tensor = tensor[slice(*key.matrices)]
            self._packed[key] = PackedMatrix(part_of(tensor, key.rows, key.columns))
        return self._packed[key]

    @property
    def bytes(self) -> int:
        """Bytes packed so far."""
        return sum(matrix.bytes for matrix in self._packed.values())

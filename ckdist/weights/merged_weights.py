"""A model's weights with an adapter added to them: W + B A; with magnitudes m (DoRA), m (W + B A) / its rows' norms."""

from pathlib import Path

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models.decoder import weight_shapes
from ckdist.weights.adapter_file import ANOTHER_MODEL, MAGNITUDE, load_adapter
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.dequantize import read_rows
from ckdist.weights.tensor_source import TensorSource


class MergedWeights:
    """The weights of `checkpoint` plus the adapter in `folder`.

    Raises ModelFileError if the adapter is not one of this model.
    """

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        stored = load_adapter(folder, checkpoint.spec, merging=True)
        if stored.head is not None:
            raise ModelFileError(
                f"{folder} is a reward model, whose head has no place in the result: serve it by --lora"
            )
        self.matrices, self.notes = stored.matrices, stored.notes
        shapes = weight_shapes(checkpoint.spec)
        for stem in self.stems:
            a, b = self._pair(stem)
            needed = shapes.get(f"{stem}.weight")
            if needed is None or (*b.shape[:-1], a.shape[-1]) != needed:
                raise ModelFileError(
                    f"{folder}: the matrices of {stem} make {[*b.shape[:-1], a.shape[-1]]}, and the model has "
                    f"{list(needed) if needed else 'no such layer'}: {ANOTHER_MODEL}"
                )

    @property
    def stems(self) -> list[str]:
        """The linears with matrices, by name."""
        return [name.removesuffix(".lora_A.weight") for name in self.matrices if name.endswith(".lora_A.weight")]

    def _pair(self, stem: str) -> tuple[np.ndarray, np.ndarray]:
        return self.matrices[f"{stem}.lora_A.weight"], self.matrices[f"{stem}.lora_B.weight"]

    def rows(self, name: str, source: TensorSource, begin: int, end: int, matrix: int = 0) -> np.ndarray:
        """Rows [begin, end) of a weight, or of one matrix of a stack, as float32 (end - begin, ...)."""
        values = read_rows(source, begin, end, matrix)
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" not in self.matrices:
            return values
        a, b = self._pair(stem)
        values = values + (b[matrix, begin:end] @ a[matrix] if b.ndim > 2 else b[begin:end] @ a)
        if (magnitudes := self.matrices.get(stem + MAGNITUDE)) is not None:
            values *= (magnitudes[begin:end] / np.linalg.norm(values, axis=1))[:, None]
        return values

"""Opens a GGUF file as a Checkpoint."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import family, read_gguf_metadata
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.gguf import GgufModel, read_gguf
from ckdist.weights.stored_weights import notes_on, required, sources

MAX_VECTOR = 1 << 10  # elements of a tensor that the spec holds


def open_gguf(path: pathlib.Path, overrides: Mapping[str, Any]) -> Checkpoint:
    """Opens a GGUF file. Raises the errors of `open_checkpoint`."""
    model = read_gguf(path, overrides)
    where = str(path)
    dims = {name: tensor.shape[::-1] for name, tensor in model.tensors.items()}
    held: set[str] = set()  # tensors that the spec holds

    def vector(name: str) -> np.ndarray | None:
        """A small tensor of this name, float32 (n,)."""
        held.add(name)
        return _vector(model, name)

    spec, unknown = read_gguf_metadata(model.metadata, dims, where, vector)
    stored = [tensor for name, tensor in model.tensors.items() if name not in held]
    shapes = weight_shapes(spec)
    found, unread = sources(spec, family(spec.family).gguf_names, stored, shapes)
    tensors = required(spec, shapes, found, where, unread)
    predicting = model.metadata.get(f"{model.metadata['general.architecture']}.nextn_predict_layers", 0)
    metadata = {name: value for name, value in model.metadata.items() if not _of_vocabulary(name, value)}
    small = [model.tensors[name] for name in held if name in model.tensors]
    spans = tuple((t.file, (t.offset, t.offset + t.nbytes)) for t in small)
    notes = tuple(f"{field} in {where} and is ignored: {spec.family} has no such field" for field in unknown)
    notes += notes_on(spec, unread, predicting, where)
    return Checkpoint(path, "gguf", spec, tensors, metadata, notes, overrides, tuple(unread), spans)


def _of_vocabulary(name: str, value: object) -> bool:
    """True if metadata is an array of the tokenizer, which reads it itself. Keeping it takes 10 MB in each rank."""
    return name.startswith("tokenizer.") and isinstance(value, list | np.ndarray)


def _vector(model: GgufModel, name: str) -> np.ndarray | None:
    """Reads a small tensor, float32 (n,); None if it is absent. Raises ModelFileError for another type or shape."""
    tensor = model.tensors.get(name)
    if tensor is None:
        return None
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_VECTOR:
        raise ModelFileError(f"{tensor.file}: {name} is {tensor.dtype} {tensor.shape}; it must be F32 (head_dim / 2,)")
    return read_tensor(tensor.source)

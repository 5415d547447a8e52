"""Writes a model as one GGUF file for llama.cpp and ckdist, with its own weights or with changed ones."""

import contextlib
import functools
import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ckdist import native
from ckdist.errors import ConfigError, EngineError
from ckdist.models.decoder import EMBEDDING, NGRAMS, OUTPUT
from ckdist.models.moe_weights import is_expert, is_router
from ckdist.models.registry import family
from ckdist.progress import ProgressBar
from ckdist.regular_file import check_replaceable
from ckdist.tokens.tokenizer_to_gguf import tokenizer_metadata
from ckdist.weights import dtypes
from ckdist.weights.checkpoint import Checkpoint, open_checkpoint
from ckdist.weights.dequantize import read_rows
from ckdist.weights.gguf import read_gguf
from ckdist.weights.gguf_writer import GgufTensorToWrite, write_gguf
from ckdist.weights.mxfp4 import block_rows, is_mxfp4
from ckdist.weights.stored_weights import head_dim, heads_of, num_experts, num_heads
from ckdist.weights.tensor_source import TensorSource

log = logging.getLogger(__name__)
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_k": 14, "bf16": 32}  # general.file_type
MXFP4_FILE = 38  # general.file_type if experts are MXFP4
TYPES = {"f32": dtypes.F32, "f16": dtypes.F16, "bf16": dtypes.BF16, "q8_0": dtypes.Q8_0, "q4_k": dtypes.Q4_K}

NOT_COPIED = ("general.architecture", "general.alignment", "general.type")  # metadata that a new file has of its own

CHUNK_FLOATS = 1 << 20  # about this much of a tensor is in memory at once: tensors of large models are far larger


def type_of(name: str, shape: tuple[int, ...], wanted: dtypes.TensorType) -> dtypes.TensorType:
    """Chooses the stored type of a tensor.

    Vectors and routers are float32, tables of experts by token int32. The embeddings and the output have at least 8
    bits. If blocks do not divide a row, the next larger type is used.
    """
    if name.endswith(".tid2eid"):
        return dtypes.I32
    if len(shape) == 1 or is_router(name):
        return dtypes.F32
    if wanted is dtypes.Q4_K and (name in (EMBEDDING, OUTPUT) or shape[-1] % 256):
        wanted = dtypes.Q8_0
    return dtypes.F16 if shape[-1] % wanted.block_elements else wanted


def stored(values: np.ndarray, kind: dtypes.TensorType) -> np.ndarray:
    """Converts float32 values, (..., rows, cols) or (n,), to the bytes of a type: uint8."""
    if kind in (dtypes.F32, dtypes.I32):  # tables are read as the bits of floats
        return np.ascontiguousarray(values, np.float32).view(np.uint8)
    cols = values.shape[-1]
    rows = values.size // cols
    out = np.empty(kind.row_bytes(rows * cols), np.uint8)
    values = np.ascontiguousarray(values)
    native.call(native.lib.ckdist_quantize, None, kind.number, rows, cols, values, out, out.nbytes)
    return out


# Reads rows [begin, end) of a weight, or of one matrix of a stack: (name, source, begin, end, matrix) -> float32
# (end - begin, ...). `matrix` may be left out.
ReadRows: TypeAlias = Callable[..., np.ndarray]


def own_rows(_name: str, source: TensorSource, begin: int, end: int, matrix: int = 0) -> np.ndarray:
    """The rows of the model's file."""
    return read_rows(source, begin, end, matrix)


@dataclass(frozen=True)
class Arrangement:
    """Order of a tensor's rows in the GGUF file, and changes of its values."""

    head_rows: int  # rows of a head whose halves are interleaved; 0: none are
    heads: int  # heads whose rows of all weights are stored together; 0: the weights are concatenated
    # The family's function of (name, values), or None.
    change: Callable[[str, np.ndarray], np.ndarray] | None
    read: ReadRows


def tensor_data(
    sources: Sequence[tuple[str, TensorSource]], kind: dtypes.TensorType, arrangement: Arrangement
) -> Iterator[np.ndarray]:
    """Yields the bytes of one tensor, made from one weight or from the rows of several.

    Rows that keep their order are converted a few at a time.
    """
    if heads := arrangement.heads:
        parts = [_changed(name, source, arrangement) for name, source in sources]
        joined = np.concatenate([part.reshape(heads, -1, part.shape[-1]) for part in parts], axis=1)
        yield stored(joined.reshape(-1, parts[0].shape[-1]), kind)
        return
    for name, source in sources:
        if arrangement.change and not source.matrices:
            yield stored(interleaved(_changed(name, source, arrangement), arrangement.head_rows), kind)
        else:
            for matrix, begin, end in _chunks(source, arrangement.head_rows or 1):
                if kind is dtypes.MXFP4:
                    yield block_rows(source, begin, end, matrix)
                else:
                    values = arrangement.read(name, source, begin, end, matrix)
                    yield stored(interleaved(values, arrangement.head_rows), kind)


def _changed(name: str, source: TensorSource, arrangement: Arrangement) -> np.ndarray:
    read = functools.partial(arrangement.read, name, source)
    matrices, rows = source.shape[:2] if source.matrices else (0, source.shape[0])
    values = np.stack([read(0, rows, matrix) for matrix in range(matrices)]) if matrices else read(0, rows)
    return arrangement.change(name, values) if arrangement.change else values


def _chunks(source: TensorSource, unit: int) -> Iterator[tuple[int, int, int]]:
    """Yields row ranges (matrix, begin, end) of a weight, matrix by matrix.

    Ranges are multiples of `unit` rows, or of whole heads if the weight is transposed.
    """
    matrices, rows = source.shape[:2] if source.matrices else (1, source.shape[0])
    columns = source.shape[-1] if len(source.shape) > 1 else 1
    if source.part and source.part.transposed:
        unit = source.part.head_rows
    at_once = max(1, CHUNK_FLOATS // columns // unit) * unit
    for matrix in range(matrices):
        for begin in range(0, rows, at_once):
            yield matrix, begin, min(begin + at_once, rows)


def interleaved(values: np.ndarray, head_rows: int) -> np.ndarray:
    """Interleaves the two halves of each head of `head_rows` rows. 0: no change."""
    if not head_rows:
        return values
    halves = values.reshape(-1, 2, head_rows // 2, *values.shape[1:])  # (heads, half, rows, ...)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _factors(checkpoint: Checkpoint) -> dict[str, str]:
    """Vector -> the one that GGUF multiplies it by."""
    ends, names = family(checkpoint.spec.family).gguf_factors.items(), checkpoint.tensors
    found = {name: f"{name.removesuffix(end)}{other}" for name in names for end, other in ends if name.endswith(end)}
    return {name: factor for name, factor in found.items() if factor in names}


def _times(factor: TensorSource, read: ReadRows, name: str, values: np.ndarray) -> np.ndarray:
    return values * read(name, factor, 0, factor.shape[0]).reshape(values.shape)


def _tensors(checkpoint: Checkpoint, wanted: dtypes.TensorType, read: ReadRows) -> list[GgufTensorToWrite]:
    """Lists the tensors of the GGUF file. Matrices have the `wanted` type."""
    tensors, spec = [], checkpoint.spec
    names, values_change = family(spec.family).gguf_names, family(spec.family).gguf_values
    factors = _factors(checkpoint)
    weights = [weight for weight in checkpoint.tensors if weight != OUTPUT or not spec.tie_embeddings]
    weights = [weight for weight in weights if weight not in factors.values()]
    for written, parts in names.stored(weights).items():
        sources = [(part, checkpoint.tensors[part]) for part in parts]
        shapes = [source.shape for _, source in sources]
        arrangement = Arrangement(
            head_dim(spec, parts[0]) if names.has("interleaved", parts[0]) else 0,
            heads_of(spec, parts[0]) if names.has("joined", written) else 0,
            functools.partial(values_change, spec) if values_change else None,
            read,
        )
        if factor := factors.get(parts[0]):
            arrangement = replace(arrangement, change=functools.partial(_times, checkpoint.tensors[factor], own_rows))
        if arrangement.change and len(shapes[0]) == 1:
            vectors = zip(parts, shapes, strict=True)
            shapes = [arrangement.change(name, np.zeros(shape, np.float32)).shape for name, shape in vectors]
        shape = (sum(one[0] for one in shapes), *shapes[0][1:])
        if parts[0] == NGRAMS:  # one matrix, of all parts
            shape = (math.prod(shape[:-1]), shape[-1])
        if names.has("stack", written):
            shape = (len(parts), *shapes[0])
        if names.has("by_head", parts[0]):
            heads = num_heads(spec, parts[0])
            shape = (heads, shape[0] // heads, shape[1])
        kind = type_of(parts[0], sources[0][1].shape if len(sources[0][1].shape) == 1 else shape, wanted)
        if is_expert(parts[0]) and len(shape) == 1:  # biases: one row per expert
            shape = (count := num_experts(spec, parts[0]), shape[0] // count)
        if read is own_rows and all(is_mxfp4(source) for _, source in sources):
            kind = dtypes.MXFP4
        tensors.append(
            GgufTensorToWrite(written, kind, shape, functools.partial(tensor_data, sources, kind, arrangement))
        )
    return tensors


def export_gguf(source: str, target: str, type_name: str, progress: bool = False, name: str | None = None) -> int:
    """Writes the folder `source` as the file `target`, and returns its size in bytes.

    Raises ConfigError if `source` is a GGUF, and the errors of `write_model`.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.format != "safetensors":
        raise ConfigError(f"{source} is a GGUF already: give a folder with safetensors")
    return write_model(checkpoint, target, type_name, progress, name)


def write_model(
    checkpoint: Checkpoint,
    target: str,
    type_name: str,
    progress: bool = False,
    name: str | None = None,
    read: ReadRows = own_rows,
) -> int:
    """Writes a model as the file `target`, and returns its size in bytes.

    MXFP4 weights that do not change are copied bit for bit, whatever the type of the others.

    Args:
        name: Name of the model. Default: that of a GGUF, or the folder's name.
        read: Reads the values of the weights.

    Raises:
        ConfigError: The target cannot be used.
        ModelFileError: The model's files are invalid.
        EngineError: The file cannot be written.
    """
    checkpoint.warn(log)
    spec, path = checkpoint.spec, pathlib.Path(target)
    if path.is_dir():
        raise ConfigError(f"{target} is a folder: name the file to write, as {path / 'model.gguf'}")
    form = family(spec.family).gguf_form(spec, str(checkpoint.path))
    metadata = _copied(checkpoint) | dict(form.metadata)
    metadata |= {"general.file_type": FILE_TYPES[type_name], "general.quantization_version": 2}
    if name:
        metadata["general.name"] = name
    tensors = _tensors(checkpoint, TYPES[type_name], read)
    tensors = [tensor._replace(name=form.names.get(tensor.name, tensor.name)) for tensor in tensors]
    if any(tensor.type is dtypes.MXFP4 for tensor in tensors):
        metadata["general.file_type"] = MXFP4_FILE
    tensors += [
        GgufTensorToWrite(written, dtypes.F32, values.shape, lambda values=values: [values.view(np.uint8)])
        for written, values in form.vectors.items()
    ]
    return write_replacing(path, metadata, tensors, progress)


def _copied(checkpoint: Checkpoint) -> dict[str, Any]:
    """The metadata that does not follow from the spec: the name and the tokenizer."""
    if checkpoint.format == "safetensors":
        tokenizer = tokenizer_metadata(checkpoint.path, checkpoint.spec.vocab_size)
        return {"general.name": checkpoint.path.resolve().name, **tokenizer}
    metadata = read_gguf(checkpoint.path, checkpoint.overrides).metadata
    return {
        key: value
        for key, value in metadata.items()
        if key.startswith(("general.", "tokenizer.")) and key not in NOT_COPIED
    }


def write_replacing(
    path: pathlib.Path, metadata: Mapping[str, Any], tensors: Sequence[GgufTensorToWrite], progress: bool
) -> int:
    """Writes a GGUF file under a temporary name, which then replaces `path`. Returns its size in bytes.

    Raises:
        ConfigError: `path` is no regular file.
        EngineError: It cannot be written.
    """
    try:
        check_replaceable(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with ProgressBar(len(tensors), "tensor", "exporting", progress) as bar:
        watched = [t._replace(data=lambda t=t: (bar.update(1), t.data())[1]) for t in tensors]
        try:
            size = write_gguf(temporary, metadata, watched)
            temporary.replace(path)
            return size
        except OSError as error:
            raise EngineError(f"{path} could not be written: {error.strerror or error}") from None
        finally:
            with contextlib.suppress(OSError):  # a read-only file system refuses even a missing file
                temporary.unlink(missing_ok=True)

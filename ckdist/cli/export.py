"""`ckdist export --gguf IN OUT.gguf`: a folder with safetensors as one GGUF file, which llama.cpp and ckdist load."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from ckdist import native
from ckdist.config import ExportCommand
from ckdist.errors import ConfigError, EngineError
from ckdist.hub.resolve import resolve
from ckdist.models.blocks.moe import is_router
from ckdist.models.decoder import EMBEDDING, OUTPUT
from ckdist.models.registry import family
from ckdist.progress import ProgressBar
from ckdist.tokens.to_gguf import tokenizer_metadata
from ckdist.weights import dtypes
from ckdist.weights.checkpoint import TensorSource, head_dim, num_heads, open_checkpoint
from ckdist.weights.dequantize import read_rows
from ckdist.weights.gguf_writer import GgufTensorToWrite, write_gguf

FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_k": 14, "bf16": 32}  # general.file_type
TYPES = {"f32": dtypes.F32, "f16": dtypes.F16, "bf16": dtypes.BF16, "q8_0": dtypes.Q8_0, "q4_k": dtypes.Q4_K}

CHUNK_FLOATS = 1 << 20  # of a tensor in memory at once, about: many times larger are the tensors of large models


def type_of(name: str, shape: tuple[int, ...], wanted: dtypes.TensorType) -> dtypes.TensorType:
    """What a tensor is stored as: vectors and routers in float32; the embeddings and the output not below 8 bits; and
    where blocks do not divide a row, the next larger.
    """
    if len(shape) == 1 or is_router(name):
        return dtypes.F32
    if wanted is dtypes.Q4_K and (name in (EMBEDDING, OUTPUT) or shape[-1] % 256):
        wanted = dtypes.Q8_0
    return dtypes.F16 if shape[-1] % wanted.block_elements else wanted


def stored(values: np.ndarray, kind: dtypes.TensorType) -> np.ndarray:
    """float32 (rows, cols), stacks of them, or (n,) as the bytes of a type: uint8."""
    if kind is dtypes.F32:
        return np.ascontiguousarray(values, np.float32).view(np.uint8)
    cols = values.shape[-1]
    rows = values.size // cols
    out = np.empty(kind.row_bytes(rows * cols), np.uint8)
    values = np.ascontiguousarray(values)
    native.check(
        native.lib.ckdist_quantize(
            native.ffi.NULL,
            kind.number,
            rows,
            cols,
            native.pointer(values, "float *"),
            native.pointer(out, "uint8_t *"),
            out.nbytes,
        )
    )
    return out


def tensor_data(sources: Sequence[TensorSource], kind: dtypes.TensorType, head_rows: int) -> Iterator[np.ndarray]:
    """The bytes of one tensor, of one weight or of the rows of several, some rows at a time.

    `head_rows`: the halves of heads of so many rows are interleaved, as GGUF has them.
    """
    for source in sources:
        matrices, rows = source.shape[:2] if source.matrices else (1, source.shape[0])
        columns = source.shape[-1] if len(source.shape) > 1 else 1
        unit = head_rows or 1
        at_once = max(1, CHUNK_FLOATS // columns // unit) * unit
        for matrix in range(matrices):
            for begin in range(0, rows, at_once):
                values = read_rows(source, begin, min(begin + at_once, rows), matrix)
                if head_rows:
                    halves = values.reshape(-1, 2, head_rows // 2, *values.shape[1:])  # (heads, half, rows, ...)
                    values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
                yield stored(values, kind)


def export_gguf(source: str, target: str, type_name: str, progress: bool = False, name: str | None = None) -> int:
    """Writes the folder `source` as the file `target`; its size. `name`: the model's (default: the folder's).

    Raises ConfigError and ModelFileError for what the user can mend.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint.format != "safetensors":
        raise ConfigError(f"{source} is a GGUF already: give a folder with safetensors")
    spec, path = checkpoint.spec, pathlib.Path(target)
    if path.is_dir():
        raise ConfigError(f"{target} is a folder: name the file to write, as {path / 'model.gguf'}")
    form = family(spec.family).to_gguf(spec, str(source))
    metadata = dict(form.metadata) | {"general.name": name or pathlib.Path(source).resolve().name}
    metadata |= {"general.file_type": FILE_TYPES[type_name], "general.quantization_version": 2}
    metadata |= tokenizer_metadata(pathlib.Path(source), spec.vocab_size)
    tensors = []
    names = family(spec.family).gguf_names
    weights = [weight for weight in checkpoint.tensors if weight != OUTPUT or not spec.tie_embeddings]
    for written, parts in names.stored(weights).items():
        sources = [checkpoint.tensors[part] for part in parts]
        shape = (sum(one.shape[0] for one in sources), *sources[0].shape[1:])
        if names.is_by_head(parts[0]):
            heads = num_heads(spec, parts[0])
            shape = (heads, shape[0] // heads, shape[1])
        kind = type_of(parts[0], shape, TYPES[type_name])
        head_rows = head_dim(spec, parts[0]) if names.is_interleaved(parts[0]) else 0
        tensors.append(
            GgufTensorToWrite(written, kind, shape, functools.partial(tensor_data, sources, kind, head_rows))
        )
    tensors += [
        GgufTensorToWrite(written, dtypes.F32, values.shape, lambda values=values: [values.view(np.uint8)])
        for written, values in form.vectors.items()
    ]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with ProgressBar(len(tensors), "tensor", "exporting", progress) as bar:
        watched = [t._replace(data=lambda t=t: (bar.update(1), t.data())[1]) for t in tensors]
        try:
            size = write_gguf(temporary, metadata, watched)
            temporary.replace(path)
            return size
        except OSError as error:
            raise EngineError(f"{target} could not be written: {error.strerror or error}") from None
        finally:
            with contextlib.suppress(OSError):  # on a file system that cannot be written, where it is not
                temporary.unlink(missing_ok=True)


def run(command: ExportCommand) -> int:
    """Writes the file; 0. ConfigError where it is not said what to export, and where."""
    if not command.gguf or command.source is None or command.target is None:
        raise ConfigError("what to export, and where? ckdist export --gguf IN OUT.gguf")
    source = resolve(command.source)
    name = None if source == command.source else command.source.rsplit("/", 1)[-1]
    size = export_gguf(source, command.target, command.type, progress=True, name=name)
    print(f"{command.target}: {command.type}, {size / 1e6:.1f} MB")
    return 0

"""A model on disk: its ModelSpec, and where each weight lies, by Hugging Face names. It loads no weights.

`open_checkpoint` takes a GGUF file (any part of a split one) or a folder with config.json and safetensors files.
"""

import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckdist.errors import ConfigError, ModelFileError
from ckdist.models.from_config import spec_from_config
from ckdist.models.from_gguf import spec_from_gguf
from ckdist.models.spec import ModelSpec
from ckdist.models.tensors import EMBEDDING, OUTPUT, tensor_shapes
from ckdist.overrides import FLAG
from ckdist.weights import dtypes, names
from ckdist.weights.gguf import MAGIC, GgufModel, read_gguf
from ckdist.weights.json_file import read_json_object
from ckdist.weights.safetensors import read_folder
from ckdist.weights.unread import notes_on_unread

ROPE_FACTORS = "rope_freqs.weight"
SAFETENSORS_TYPES = {"F32": dtypes.F32, "F16": dtypes.F16, "BF16": dtypes.BF16}


@dataclass(frozen=True)
class TensorSource:
    """Where one weight lies and how what is stored becomes what Hugging Face means by its name."""

    name: str
    type: int  # ggml number
    shape: tuple[int, ...]  # (out, in) or (n,)
    file: pathlib.Path
    offset: int  # bytes from the start of the file
    head_rows: int = 0  # > 0: the halves of each head of this many rows are stored interleaved
    plus_one: bool = False  # the weight is one more than what is stored

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return dtypes.BY_NUMBER[self.type].row_bytes(int(np.prod(self.shape, dtype=np.int64)))

    @property
    def row_order(self) -> np.ndarray | None:
        """int32 (rows,): the stored row of each row; None where they are the same.

        Row j of the first half of head h is stored at h * head_rows + 2 j, of the second half right behind it.
        """
        if not self.head_rows:
            return None
        rows = np.arange(self.shape[0], dtype=np.int32)
        head, half, j = (
            rows // self.head_rows,
            rows % self.head_rows // (self.head_rows // 2),
            rows % (self.head_rows // 2),
        )
        return head * self.head_rows + 2 * j + half


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. With tied embeddings `lm_head.weight` is the same source as `model.embed_tokens.weight`."""

    path: pathlib.Path  # as it was given
    format: str  # gguf, safetensors
    spec: ModelSpec
    tensors: Mapping[str, TensorSource] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)  # of the GGUF, or config.json
    notes: tuple[str, ...] = ()  # what of the files is not used, one line each
    # that stand in the metadata in place of the file's
    overrides: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def folder(self) -> pathlib.Path:
        """The folder in which the model's files are."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights in the files, each counted once."""
        return sum({source.name: source.nbytes for source in self.tensors.values()}.values())


def open_checkpoint(path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """The model at `path`: a GGUF file, with `overrides` put over its metadata, or a folder with config.json and
    safetensors files.

    Raises ModelFileError when it is not a model, a file is missing or damaged, a weight is missing or has the wrong
    shape, or the files hold weights that the model's family does not use; ArchitectureError when its family is not
    known; ConfigError for overrides that cannot be put there.
    """
    path = pathlib.Path(path)
    try:
        if path.is_dir():
            if overrides:
                raise ConfigError(
                    f"{FLAG} sets metadata of GGUF files, and {path} is a folder: "
                    "change its config.json, or give a GGUF file"
                )
            return _open_folder(path)
        if path.exists() and not path.is_file():  # a pipe would block
            raise ModelFileError(f"{path} is neither a file nor a folder")
        with open(path, "rb") as file:
            magic = file.read(4)
    except (OSError, ValueError) as e:  # ValueError: a null byte in the path
        raise ModelFileError(f"{path} cannot be opened: {getattr(e, 'strerror', None) or e}") from None
    if magic != MAGIC:
        raise ModelFileError(
            f"{path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}; for safetensors give the folder"
        )
    return _open_gguf(path, overrides or {})


def _open_gguf(path: pathlib.Path, overrides: Mapping[str, Any]) -> Checkpoint:
    model = read_gguf(path, overrides)
    where = str(path)
    dims = {name: tensor.dims for name, tensor in model.tensors.items()}
    spec = spec_from_gguf(model.metadata, dims, where, _rope_factors(model))
    wanted, found, unread = tensor_shapes(spec), {}, []
    for tensor in model.tensors.values():
        name = names.from_gguf(tensor.name, spec.post_norms)
        if name not in wanted:
            unread.append(tensor.name)
            continue
        found[name] = TensorSource(
            name,
            tensor.type.number,
            tensor.dims[::-1],
            tensor.file,
            tensor.offset,
            head_rows=spec.head_dim if names.gguf_rows_interleaved(spec.architecture, name) else 0,
        )
    tensors = _required(spec, found, where)
    unread = [name for name in unread if name != ROPE_FACTORS]  # which the spec holds
    predicting = model.metadata.get(f"{spec.architecture}.nextn_predict_layers", 0)
    return Checkpoint(path, "gguf", spec, tensors, model.metadata, _notes(spec, unread, predicting, where), overrides)


def _open_folder(path: pathlib.Path) -> Checkpoint:
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ModelFileError(f"{path} is not a model: it has no config.json; give a folder with one, or a GGUF file")
    config = read_json_object(config_path)
    spec = spec_from_config(config, str(config_path))
    if isinstance(quantization := config.get("quantization_config"), dict):
        method = str(quantization.get("quant_method"))
        raise ModelFileError(
            f"{path} is quantised by {method[:40]!r}, which is not read; "
            "take the model as it was before, or a GGUF file of it"
        )
    wanted = {*tensor_shapes(spec), OUTPUT}
    found: dict[str, TensorSource] = {}
    unread = []
    for stored in read_folder(path).values():
        name = names.from_safetensors(stored.name)
        if name not in wanted:
            unread.append(stored.name)
            continue
        if name in found:
            raise ModelFileError(f"{path}: {stored.name!r} and another tensor are both {name!r}")
        if stored.dtype not in SAFETENSORS_TYPES:
            known = ", ".join(SAFETENSORS_TYPES)
            raise ModelFileError(f"{stored.file}: tensor {name!r} has dtype {stored.dtype}; the known ones are {known}")
        found[name] = TensorSource(
            name,
            SAFETENSORS_TYPES[stored.dtype].number,
            stored.shape,
            stored.file,
            stored.offset,
            plus_one=names.safetensors_norm_less_one(spec.architecture, name),
        )
    if spec.tie_embeddings and OUTPUT in found and EMBEDDING in found and not _alike(found[OUTPUT], found[EMBEDDING]):
        spec = replace(spec, tie_embeddings=False)  # config.json says otherwise, but somebody has trained it
    tensors = _required(spec, found, str(path))
    return Checkpoint(
        path,
        "safetensors",
        spec,
        tensors,
        config,
        _notes(spec, unread, config.get("num_nextn_predict_layers"), str(path)),
    )


def _notes(spec: ModelSpec, unread: list[str], predicting_layers: Any, where: str) -> tuple[str, ...]:
    count = predicting_layers if type(predicting_layers) is int else 0
    return notes_on_unread(unread, spec.architecture, spec.num_layers, count, where)


def _alike(a: TensorSource, b: TensorSource) -> bool:
    """Whether the bytes of two tensors are the same."""
    if (a.type, a.shape) != (b.type, b.shape):
        return False
    chunk = 1 << 22
    with open(a.file, "rb") as file, open(b.file, "rb") as other:
        file.seek(a.offset)
        other.seek(b.offset)
        return all(
            file.read(n) == other.read(n) for n in (min(chunk, a.nbytes - at) for at in range(0, a.nbytes, chunk))
        )


def _required(spec: ModelSpec, found: Mapping[str, TensorSource], where: str) -> dict[str, TensorSource]:
    """The sources of all weights that `spec` needs, in its order; ModelFileError when one is missing or misshapen."""
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        source = found.get(name)
        if source is None:
            raise ModelFileError(
                f"{where}: tensor {name!r} of shape {shape} is missing; {len(found)} tensors of the model are there"
            )
        if source.shape != shape:
            raise ModelFileError(
                f"{source.file}: tensor {name!r} has shape {source.shape}, but the model needs {shape}"
            )
        stored = dtypes.BY_NUMBER[source.type]
        if len(shape) == 1 and stored not in dtypes.FLOATS:
            raise ModelFileError(f"{source.file}: vector {name!r} has type {stored.name}; it must be F32, F16 or BF16")
        tensors[name] = source
    if spec.tie_embeddings:
        tensors[OUTPUT] = tensors[EMBEDDING]
    return tensors


def _rope_factors(model: GgufModel) -> np.ndarray | None:
    """The factors of llama3's scaling, float32 (head_dim / 2,), which GGUF stores as a tensor."""
    tensor = model.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type is not dtypes.F32 or len(tensor.dims) != 1 or tensor.dims[0] > 1 << 10:
        raise ModelFileError(
            f"{tensor.file}: rope_freqs.weight is {tensor.type.name} {tensor.dims}; it must be F32 (head_dim / 2,)"
        )
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset)
        return np.frombuffer(file.read(tensor.nbytes), "<f4")

"""A model on disk: its ModelSpec, and the file and offset of each weight by Hugging Face names. It loads no weights.

`open_checkpoint` takes a GGUF file (any part of a split one) or a folder with config.json and safetensors files.
"""

import logging
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckdist.errors import ConfigError, ModelFileError
from ckdist.hub.local_copy import open_file
from ckdist.layout import Range
from ckdist.models.decoder import EMBEDDING, OUTPUT, weight_shapes
from ckdist.models.families.family import TensorNames, stack_of
from ckdist.models.registry import family, read_config, spec_from_gguf
from ckdist.models.spec import GatedDeltaNet, LatentAttention, ModelSpec, MoeFfn
from ckdist.overrides import FLAG
from ckdist.weights import dtypes
from ckdist.weights.generation import with_generation_rules
from ckdist.weights.gguf import MAGIC, GgufModel, read_gguf
from ckdist.weights.json_file import read_json_object
from ckdist.weights.published import join_tensors, quantization_config
from ckdist.weights.safetensors import read_folder
from ckdist.weights.scales import Scales, stacked_scales
from ckdist.weights.tensor_source import HeadPart, TensorSource
from ckdist.weights.unread import notes_on_unread

MAX_VECTOR = 1 << 10  # elements of a tensor that the spec holds
SAFETENSORS_TYPES = {"F32": dtypes.F32, "F16": dtypes.F16, "BF16": dtypes.BF16}
KNOWN_TYPES = f"the known ones are {', '.join(SAFETENSORS_TYPES)}: save it as one of these"


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk. With tied embeddings `lm_head.weight` is the same source as `model.embed_tokens.weight`."""

    path: pathlib.Path  # as the user gave it
    format: str  # gguf, safetensors
    spec: ModelSpec
    tensors: Mapping[str, TensorSource] = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)  # GGUF metadata without the vocabulary, or config.json
    notes: tuple[str, ...] = ()  # parts of the files that are not used, one line each
    overrides: Mapping[str, Any] = field(default_factory=dict, repr=False)  # values that replace the file's metadata
    held: tuple[tuple[pathlib.Path, Range], ...] = ()  # file and bytes of small tensors that the spec holds

    @property
    def folder(self) -> pathlib.Path:
        """The folder of the model's files."""
        return self.path if self.path.is_dir() else self.path.parent

    def warn(self, log: logging.Logger) -> None:
        """Logs the notes."""
        for note in self.notes:
            log.warning("%s: %s", self.path.name, note)

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights in the files. Tied weights count once."""
        return sum({(source.file, source.offset): source.nbytes for source in self.tensors.values()}.values())


def open_checkpoint(path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Opens the model at `path`: a GGUF file, or a folder with config.json and safetensors files.

    `overrides` replace metadata of a GGUF file.

    Raises:
        ModelFileError: It is not a model, a file is missing or damaged, a weight is missing or has the wrong shape, or
            the files hold weights that the model's family does not use.
        ArchitectureError: The family of the model is not known.
        ConfigError: An override cannot be applied.
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
        with open_file(path) as file:
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
    held: set[str] = set()  # tensors that the spec holds

    def vector(name: str) -> np.ndarray | None:
        """A small tensor of this name, float32 (n,)."""
        held.add(name)
        return _vector(model, name)

    spec = spec_from_gguf(model.metadata, dims, where, vector)
    stored = [
        StoredWeights(t.name, t.type.number, t.dims[::-1], t.file, t.offset)
        for t in model.tensors.values()
        if t.name not in held
    ]
    found, unread = _sources(spec, family(spec.family).gguf_names, stored, weight_shapes(spec))
    tensors = _required(spec, found, where, unread)
    predicting = model.metadata.get(f"{model.metadata['general.architecture']}.nextn_predict_layers", 0)
    metadata = {name: value for name, value in model.metadata.items() if not _of_vocabulary(name, value)}
    small = [model.tensors[name] for name in held if name in model.tensors]
    spans = tuple((t.file, (t.offset, t.offset + t.nbytes)) for t in small)
    return Checkpoint(path, "gguf", spec, tensors, metadata, _notes(spec, unread, predicting, where), overrides, spans)


def _of_vocabulary(name: str, value: object) -> bool:
    """Whether metadata is an array of the tokenizer. It reads them itself; kept here, they take 10 MB in each rank."""
    return name.startswith("tokenizer.") and isinstance(value, list | np.ndarray)


def _open_folder(path: pathlib.Path) -> Checkpoint:
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ModelFileError(f"{path} is not a model: it has no config.json; give a folder with one, or a GGUF file")
    config = with_generation_rules(read_json_object(config_path), path)
    spec, unknown = read_config(config, str(config_path))
    folder, joined = read_folder(path), []
    tensors = folder.tensors
    if quantization := quantization_config(config):
        joined, tensors = join_tensors(tensors, quantization, str(path))
    stored = [
        StoredWeights(t.name, t.type.number, t.shape, t.codes.file, t.codes.offset, t.codes.dtype, t.scales)
        for t in joined
    ]
    stored += [
        StoredWeights(
            t.name,
            SAFETENSORS_TYPES[t.dtype].number if t.dtype in SAFETENSORS_TYPES else -1,
            t.shape,
            t.file,
            t.offset,
            t.dtype,
        )
        for t in tensors.values()
    ]
    shapes, names = weight_shapes(spec), family(spec.family).safetensors
    found, unread = _sources(spec, names, stored, {OUTPUT: shapes[EMBEDDING], **shapes})
    notes = [*folder.notes, *_naming_notes(names, stored, shapes)]
    if spec.tie_embeddings and OUTPUT in found and EMBEDDING not in found:
        found[EMBEDDING] = replace(found[OUTPUT], name=EMBEDDING)
    elif spec.tie_embeddings and OUTPUT in found and not _has_same_bytes(found[OUTPUT], found[EMBEDDING]):
        spec = replace(spec, tie_embeddings=False)
        notes.append(
            f"config.json ties {OUTPUT} to {EMBEDDING}, and the file has another one, which is used, "
            "as in transformers: set tie_word_embeddings to false"
        )
    tensors = _required(spec, found, str(path), unread)
    predicting = config.get("num_nextn_predict_layers")
    notes += [f"{field} in config.json and is ignored: {spec.family} has no such field" for field in unknown]
    notes += _notes(spec, unread, predicting, str(path))
    return Checkpoint(path, "safetensors", spec, tensors, config, tuple(notes))


def _naming_notes(
    names: TensorNames, stored: Sequence["StoredWeights"], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """A note if tensors are read whose names lack `model.`."""
    stacks = {stack_of(one.name)[0]: one.name for one in stored}
    lacking = [
        stacks[stack] for stack in stacks if weights_of(names, stack, shapes) not in ((), names.weights_of(stack))
    ]
    return [f"names of tensors lack 'model.', as {name!r:.100}: they are read with it" for name in lacking[:1]]


@dataclass(frozen=True)
class StoredWeights:
    """A tensor in a file. It holds one or more weights: each has some of its rows, in each matrix of a stack."""

    name: str
    type: int  # ggml number; -1 if the type is not supported
    shape: tuple[int, ...]
    file: pathlib.Path
    offset: int
    dtype: str = ""  # the file's name of the type
    scales: Scales | None = None


def _sources(
    spec: ModelSpec, names: TensorNames, stored: list[StoredWeights], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, TensorSource], list[str]]:
    """The source of each weight of `shapes`, and the names of tensors that hold none of them."""
    found: dict[str, TensorSource] = {}
    stacks: dict[str, dict[int, TensorSource]] = {}
    unread = []
    for one in stored:
        name, index = stack_of(one.name)
        weights = weights_of(names, name, shapes)
        if not weights:
            unread.append(one.name)
            continue
        # a vector may be stored as a matrix with one row for each channel
        tensor = replace(one, shape=(math.prod(one.shape),)) if len(shapes[weights[0]]) == 1 else one
        if names.has("keys_values", tensor.name) or names.has("joined", tensor.name):
            joined = names.has("joined", tensor.name)
            parts = _joined_parts(spec, tensor, weights, shapes) if joined else _head_parts(spec, tensor, weights)
            for part in parts:
                if part.name in found:
                    raise ModelFileError(f"{tensor.file}: {tensor.name!r} and another tensor are both {part.name!r}")
                found[part.name] = part
            continue
        if tensor.type < 0:
            raise ModelFileError(f"{tensor.file}: tensor {weights[0]!r} has dtype {tensor.dtype}; {KNOWN_TYPES}")
        known = found if index is None else {w: s[index] for w, s in stacks.items() if index in s}
        transposed = tensor.scales is None and names.has("transposed", name)
        if transposed or names.has("alternating", name):
            sources = _interleaved_weights(tensor, weights, shapes, transposed)
        else:
            sources = _weights_in(tensor, weights, shapes)
        for source in sources:
            weight = source.name
            if weight in known or (index is not None and weight in found):
                raise ModelFileError(f"{tensor.file}: {tensor.name!r} and another tensor are both {weight!r}")
            if index is not None:
                stacks.setdefault(weight, {})[index] = source
                continue
            head_rows = head_dim(spec, weight) if names.has("interleaved", weight) else 0
            found[weight] = replace(
                source,
                head_rows=head_rows,
                plus_one=names.has("plus_one", weight),
                minus_exp=names.has("minus_exp", weight),
            )
    for weight, matrices in stacks.items():
        found[weight] = _stacked(weight, matrices, shapes[weight])
    return found, unread


def weights_of(names: TensorNames, stored: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """The weights in a stored tensor, if all are in `shapes`. Its name may lack `model.`, as AutoModel saves it."""
    for name in (stored, f"model.{stored}"):
        weights = names.weights_of(name)
        if weights and all(weight in shapes for weight in weights):
            return weights
    return ()


def _weights_in(
    tensor: StoredWeights, weights: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> list[TensorSource]:
    """The sources of weights whose rows follow one another in a tensor, or in each matrix of a stack."""
    if len(weights) == 1 and shapes[weights[0]] == (1, *tensor.shape):  # a matrix of one row, stored as a vector
        tensor = replace(tensor, shape=(1, *tensor.shape))
    of_rows = max(0, len(tensor.shape) - 2)  # index of the row dimension
    there = tensor.shape[of_rows] if tensor.shape else 0
    rows = [shapes[weight][-2 if len(shapes[weight]) > 1 else 0] for weight in weights] if len(weights) > 1 else [there]
    if there != sum(rows):
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape}, "
            f"but the model needs {sum(rows)} rows: {', '.join(map(str, rows))} of {', '.join(weights)}"
        )
    columns, scales = int(np.prod(tensor.shape[of_rows + 1 :], dtype=np.int64)), tensor.scales
    row_bytes = scales.code_bytes(columns) if scales else dtypes.BY_NUMBER[tensor.type].row_bytes(columns)
    found = []
    for weight, count, begin in zip(weights, rows, np.cumsum([0, *rows]).tolist(), strict=False):
        shape = tensor.shape if len(weights) == 1 else (*tensor.shape[:of_rows], count, *tensor.shape[of_rows + 1 :])
        offsets = [tensor.offset + (matrix * there + begin) * row_bytes for matrix in range(math.prod(shape[:of_rows]))]
        stack = tuple((tensor.file, offset) for offset in offsets) if of_rows else ()
        part = scales and replace(scales, first_row=scales.first_row + begin)
        found.append(TensorSource(weight, tensor.type, shape, tensor.file, offsets[0], matrices=stack, scales=part))
    return found


def _interleaved_weights(
    tensor: StoredWeights, weights: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]], transposed: bool
) -> list[TensorSource]:
    """The sources of weights whose rows alternate in a tensor, or in each matrix of a stack.

    If `transposed`, the tensor's rows are inputs, and its columns alternate.
    """
    count, shape = len(weights), shapes[weights[0]]
    *stack, rows, columns = shape if len(shape) > 1 else (*shape, 1)
    needed = (*stack, columns, count * rows) if transposed else (*stack, count * rows, columns)
    if tensor.shape != (needed if len(shape) > 1 else (count * rows,)):
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape}, but the model needs "
            f"{math.prod(needed)} elements of {', '.join(weights)}: {needed}"
        )
    elements, scales = math.prod(needed[-2:]), tensor.scales
    matrix_bytes = scales.code_bytes(elements) if scales else dtypes.BY_NUMBER[tensor.type].row_bytes(elements)
    offsets = [tensor.offset + matrix * matrix_bytes for matrix in range(math.prod(stack))]
    places = tuple((tensor.file, offset) for offset in offsets) if stack else ()
    parts = (
        HeadPart(columns, 0, columns, count * rows, True, count, lane)
        if transposed
        else HeadPart(count, lane, 1, columns)
        for lane in range(count)
    )
    return [
        TensorSource(
            weight, tensor.type, shapes[weight], tensor.file, tensor.offset, matrices=places, part=part, scales=scales
        )
        for weight, part in zip(weights, parts, strict=True)
    ]


def _stacked(weight: str, matrices: Mapping[int, TensorSource], shape: tuple[int, ...]) -> TensorSource:
    """A stack of matrices that are stored one by one.

    Raises ModelFileError if one is missing, if there are too many, or if one differs in type or shape.
    """
    first = matrices[min(matrices)]
    if len(shape) != 3:
        raise ModelFileError(f"{first.file}: {weight!r} is stored as {len(matrices)} matrices, but the model has one")
    missing = [index for index in range(shape[0]) if index not in matrices]
    if missing or len(matrices) > shape[0]:
        what = f"number {missing[0]} is missing" if missing else f"number {max(matrices)} is one too many"
        raise ModelFileError(f"{first.file}: {weight!r} needs {shape[0]} matrices and has {len(matrices)}: {what}")
    for index, one in matrices.items():
        if (one.type, one.shape) != (first.type, first.shape):
            raise ModelFileError(
                f"{one.file}: matrix {index} of {weight!r} is {dtypes.BY_NUMBER[one.type].name} {one.shape}, "
                f"but others are {dtypes.BY_NUMBER[first.type].name} {first.shape}"
            )
    ordered = [matrices[index] for index in range(shape[0])]
    places = tuple((one.file, one.offset) for one in ordered)
    scales = stacked_scales([one.scales for one in ordered], f"{first.file}: {weight!r}")
    return TensorSource(weight, first.type, (shape[0], *first.shape), *places[0], matrices=places, scales=scales)


def _head_parts(spec: ModelSpec, tensor: StoredWeights, weights: tuple[str, ...]) -> list[TensorSource]:
    """The sources of the matrices that make keys and values from a latent vector. The tensor has both for each head."""
    mixer = spec.layers[int(weights[0].split(".")[2])].mixer
    assert isinstance(mixer, LatentAttention)  # only latent attention has these weights
    keys, values, rank, heads = mixer.nope_dim, mixer.v_dim, mixer.kv_lora_rank, mixer.num_heads
    if tensor.shape != (heads * (keys + values), rank):
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape}, "
            f"but the model needs {(heads * (keys + values), rank)}"
        )
    if tensor.type < 0:
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name!r} has dtype {tensor.dtype}; {KNOWN_TYPES}")
    k_part = HeadPart(keys + values, 0, keys, rank, transposed=True)
    v_part = HeadPart(keys + values, keys, values, rank)
    stored = {"file": tensor.file, "offset": tensor.offset, "scales": tensor.scales}
    source = lambda name, shape, part: TensorSource(name, tensor.type, shape, part=part, **stored)
    return [source(weights[0], (heads * rank, keys), k_part), source(weights[1], (heads * values, rank), v_part)]


def _joined_parts(
    spec: ModelSpec, tensor: StoredWeights, weights: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> list[TensorSource]:
    """The sources of weights in a tensor that has, for each head, the rows of one weight, then of the next."""
    heads = heads_of(spec, weights[0])
    rows = [shapes[weight][0] // heads for weight in weights]  # rows per head
    columns = shapes[weights[0]][1]
    if tensor.type < 0 or tensor.shape != (heads * sum(rows), columns):
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape} {tensor.dtype}, but the model needs "
            f"{(heads * sum(rows), columns)}: for each of {heads} heads rows of {', '.join(weights)}"
        )
    begins = np.cumsum([0, *rows]).tolist()
    return [
        TensorSource(
            weight, tensor.type, shapes[weight], tensor.file, tensor.offset,
            part=HeadPart(sum(rows), begin, count, columns),
        )
        for weight, count, begin in zip(weights, rows, begins, strict=False)
    ]  # fmt: skip


def heads_of(spec: ModelSpec, weight: str) -> int:
    """The number of heads in a tensor that groups rows of several weights by head."""
    mixer = spec.layers[int(weight.split(".")[2])].mixer
    return mixer.num_key_heads if isinstance(mixer, GatedDeltaNet) else mixer.num_heads


def head_dim(spec: ModelSpec, weight: str) -> int:
    """Rows of one head of a layer's queries and keys."""
    return spec.layers[int(weight.split(".")[2])].attention.head_dim


def num_heads(spec: ModelSpec, weight: str) -> int:
    """The number of heads of a layer with latent attention."""
    mixer = spec.layers[int(weight.split(".")[2])].mixer
    assert isinstance(mixer, LatentAttention)  # only latent attention has these weights
    return mixer.num_heads


def num_experts(spec: ModelSpec, weight: str) -> int:
    """The number of experts of a layer with experts."""
    ffn = spec.layers[int(weight.split(".")[2])].ffn
    assert isinstance(ffn, MoeFfn)  # only a layer with experts has these weights
    return ffn.num_experts


def _notes(spec: ModelSpec, unread: list[str], predicting_layers: Any, where: str) -> tuple[str, ...]:
    count = predicting_layers if type(predicting_layers) is int else 0
    return notes_on_unread(unread, family(spec.family), len(spec.layers), count, where)


def _has_same_bytes(a: TensorSource, b: TensorSource) -> bool:
    if (a.type, a.shape) != (b.type, b.shape):
        return False
    chunk = 1 << 22
    with open_file(a.file) as file, open_file(b.file) as other:
        file.seek(a.offset)
        other.seek(b.offset)
        return all(
            file.read(n) == other.read(n) for n in (min(chunk, a.nbytes - at) for at in range(0, a.nbytes, chunk))
        )


def _required(
    spec: ModelSpec, found: Mapping[str, TensorSource], where: str, unread: Sequence[str]
) -> dict[str, TensorSource]:
    """The sources of all weights that `spec` needs, in its order.

    Raises ModelFileError if one is missing or has the wrong shape or type.
    """
    tensors = {}
    for name, shape in weight_shapes(spec).items():
        source = found.get(name)
        if source is None:
            there = f"{len(found)} tensors of the model are there"
            if not found and unread:
                there = f"none of the model's tensors are there, but {unread[0]!r:.100} is one of {len(unread)}"
            raise ModelFileError(f"{where}: tensor {name!r} of shape {shape} is missing; {there}")
        if len(shape) == 2 and len(source.shape) == 3:  # one matrix per head; their rows follow one another
            source = replace(source, shape=(source.shape[0] * source.shape[1], source.shape[2]), matrices=())
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


def _vector(model: GgufModel, name: str) -> np.ndarray | None:
    """Reads a small tensor, float32 (n,); None if it is absent. Raises ModelFileError for another type or shape."""
    tensor = model.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type is not dtypes.F32 or len(tensor.dims) != 1 or tensor.dims[0] > MAX_VECTOR:
        raise ModelFileError(
            f"{tensor.file}: {name} is {tensor.type.name} {tensor.dims}; it must be F32 (head_dim / 2,)"
        )
    with open_file(tensor.file) as file:
        file.seek(tensor.offset)
        return np.frombuffer(file.read(tensor.nbytes), "<f4")

"""Reads the headers of safetensors files, single or indexed: name, type, shape and offset of each tensor.

It reads no tensor data. Each length, offset and shape is checked against the file.
Format: https://github.com/huggingface/safetensors#format.
"""

import math
import os
import pathlib
import re
from dataclasses import dataclass
from typing import Any, TypeGuard

from ckdist.errors import ModelFileError
from ckdist.hub.folder_files import INDEX_FILE, SINGLE_FILE
from ckdist.hub.local_copy import open_file
from ckdist.weights.dtypes import FLOAT_NUMBERS
from ckdist.weights.json_file import parse_json_object, read_json_object
from ckdist.weights.tensor_source import StoredTensor

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_TENSORS = 1 << 16
MAX_DIMENSIONS = 8
MAX_DIMENSION = 1 << 40

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")

_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class StoredFolder:
    """The tensors of a folder. `notes` has a line for each ambiguous choice of files."""

    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...] = ()


def read_folder(folder: str | os.PathLike[str]) -> StoredFolder:
    """Reads `model.safetensors`, or else the files in `model.safetensors.index.json`, or else the shards.

    transformers uses the same order, but requires an index for shards.

    Raises:
        ModelFileError: None of them exists, a file is missing or damaged, or the index names a tensor or file that is
            missing or outside the folder.
    """
    folder = pathlib.Path(folder)
    shards = [match for path in sorted(folder.iterdir()) if (match := _SHARD.fullmatch(path.name))]
    if (folder / SINGLE_FILE).is_file():
        others = [name for name in (INDEX_FILE, *(shard[0] for shard in shards)) if (folder / name).is_file()]
        notes = ()
        if shards:
            notes = (f"{SINGLE_FILE} is read, and {' and '.join(others[:2])} beside it are not: remove one of the two",)
        return StoredFolder(read_safetensors(folder / SINGLE_FILE), notes)
    if (folder / INDEX_FILE).is_file():
        return StoredFolder(_indexed(folder))
    if not shards:
        raise ModelFileError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    return _shards(folder, shards)


def _shards(folder: pathlib.Path, shards: list[re.Match[str]]) -> StoredFolder:
    """The tensors of shards without an index."""
    sets = sorted({(shard["stem"], shard["count"]) for shard in shards})
    if len(sets) > 1:
        names = " and ".join(f"{stem}-*-of-{count}.safetensors" for stem, count in sets[:2])
        raise ModelFileError(f"{folder} has shards of several models, {names}, and no {INDEX_FILE}: keep those of one")
    stem, count = sets[0]
    numbers = {int(shard["number"]) for shard in shards}
    missing = next((n for n in range(1, int(count) + 1) if n not in numbers), None)
    if missing is not None:
        raise ModelFileError(f"{folder / f'{stem}-{missing:05}-of-{count}.safetensors'} is missing: fetch it again")
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in read_safetensors(folder / shard[0]).items():
            if name in tensors:
                raise ModelFileError(f"{tensor.file} and {tensors[name].file} both have tensor {name!r:.200}")
            tensors[name] = tensor
    return StoredFolder(tensors, (f"{INDEX_FILE} is missing: all {len(shards)} shards are read",))


def _indexed(folder: pathlib.Path) -> dict[str, StoredTensor]:
    index_path = folder / INDEX_FILE
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFileError(f"{index_path} has no 'weight_map' of tensor names to file names")
    stored: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(set(weight_map.values())):
        if not name.endswith(".safetensors") or "/" in name or "\\" in name or not name.isprintable():
            raise ModelFileError(
                f"{index_path} names {name!r}, which is not the name of a safetensors file in its folder"
            )
        if not (folder / name).is_file():
            raise ModelFileError(
                f"{folder / name} is missing: {INDEX_FILE} names it among {len(set(weight_map.values()))} files"
            )
        stored[name] = read_safetensors(folder / name)
    tensors = {}
    for name, file in weight_map.items():
        if name not in stored[file]:
            raise ModelFileError(
                f"{index_path} says that tensor {name!r} is in {file}, "
                f"but it is not among the {len(stored[file])} there"
            )
        tensors[name] = stored[file][name]
    for file in stored.values():
        for name, tensor in file.items():
            tensors.setdefault(name, tensor)  # tensors that the index lacks are read too
    return tensors


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Reads the header of one safetensors file. Raises ModelFileError if it does not fit the file."""
    path = pathlib.Path(path)
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ModelFileError(
                    f"{path}: the header has {length} bytes, but the file has {size}: "
                    "it is truncated or not safetensors"
                )
            if length > MAX_HEADER_BYTES:
                raise ModelFileError(f"{path}: the header has {length} bytes, more than the {MAX_HEADER_BYTES} allowed")
            data = file.read(length)
    except OSError as e:
        raise ModelFileError(f"{path} cannot be read: {e.strerror or e}") from None
    header = parse_json_object(data, f"{path}: the header")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ModelFileError(f"{path} has {len(header)} tensors, more than the {MAX_TENSORS} allowed")
    tensors = {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}
    end, last = 8 + length, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            way = "before" if tensor.offset < end else "and not where"
            raise ModelFileError(
                f"{path}: tensor {tensor.name!r} begins at byte {tensor.offset}, {way} {last!r} ends at {end}: "
                "it is damaged"
            )
        end, last = tensor.offset + tensor.nbytes, tensor.name
    if end != size:
        raise ModelFileError(
            f"{path}: {last!r} ends at byte {end}, but the file has {size} bytes: "
            "it is damaged, since tensors must fill it"
        )
    return tensors


def _stored(path: pathlib.Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    where = f"{path}: tensor {name[:200]!r}"
    if not isinstance(entry, dict):
        raise ModelFileError(f"{where} is described by {type(entry).__name__}, not by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise ModelFileError(f"{where} has dtype {str(dtype)[:40]!r}; the known ones are {', '.join(_ITEM_BYTES)}")
    if not _is_integers(shape) or len(shape) > MAX_DIMENSIONS or not all(0 <= n <= MAX_DIMENSION for n in shape):
        allowed = f"a list of up to {MAX_DIMENSIONS} numbers up to {MAX_DIMENSION}"
        raise ModelFileError(f"{where} has shape {str(shape)[:200]}; it must be {allowed}")
    if not _is_integers(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
        raise ModelFileError(f"{where} has data_offsets {str(offsets)[:200]}; they must be two ascending numbers")
    begin, end = offsets
    if data_start + end > size:
        raise ModelFileError(
            f"{where} ends at byte {data_start + end}, but the file has {size} bytes: it is truncated or damaged"
        )
    nbytes = _ITEM_BYTES[dtype] * math.prod(shape)
    if nbytes != end - begin:
        raise ModelFileError(
            f"{where} of shape {shape} and dtype {dtype} takes {nbytes} bytes, but data_offsets give it {end - begin}"
        )
    number = FLOAT_NUMBERS.get(dtype, -1)
    return StoredTensor(name, number, tuple(shape), path, data_start + begin, dtype, nbytes)


def _is_integers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int for n in value)

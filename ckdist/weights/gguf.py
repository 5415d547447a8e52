"""Reads the header of GGUF files, versions 2 and 3, whole or split: metadata, and the offset of each tensor.

It reads no tensor data and maps no memory. Each count, length, offset and dimension is checked against the file and
against a limit before use. A hostile file therefore causes a ModelFileError within bounded time and memory.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import os
import pathlib
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import numpy as np

from ckdist.errors import ConfigError, ModelFileError
from ckdist.hub.local_copy import open_file
from ckdist.overrides import FLAG
from ckdist.weights import dtypes
from ckdist.weights.tensor_source import StoredTensor

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 128 << 20  # metadata and tensor infos; the largest vocabularies take some 20 MB
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 1 << 10  # for names of keys and tensors
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY = 1 << 24  # elements
# total number of strings and arrays inside arrays: bounds the memory of a parsed header
MAX_OBJECTS = 1 << 22
MAX_ARRAY_DEPTH = 3
MAX_DIMENSIONS = 4
MAX_DIMENSION = 1 << 40
MAX_ALIGNMENT = 1 << 20

_CHUNK = 1 << 20
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {  # value type -> little-endian numpy type
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"), 10: np.dtype("<u8"),
    11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip


@dataclass(frozen=True)
class GgufModel:
    """A GGUF model: the metadata of its first file and the tensors of all files.

    Metadata values are int, float, bool, str, numpy arrays of numbers, or lists of strings or arrays.
    """

    files: tuple[pathlib.Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor] = field(repr=False)


def read_gguf(
    path: str | os.PathLike[str], overrides: Mapping[str, int | float | bool | str] | None = None
) -> GgufModel:
    """Reads the GGUF model at `path`, which may be any part of a split model; the others are in the same folder.

    `overrides` replace or add metadata.

    Raises:
        ModelFileError: A file is missing, damaged or not supported.
        ConfigError: An override has another type than the file's value.
    """
    model = _read_model(pathlib.Path(path))
    for key, value in (overrides or {}).items():
        stored = model.metadata.get(key, value)
        if type(stored) is not type(value):
            names = {int: "int", float: "float", bool: "bool", str: "str"}
            there = names.get(type(stored), "an array")
            raise ConfigError(
                f"{FLAG} {key} is of type {names[type(value)]}, but in {path} it is {there}: "
                "only a value of the same type can replace it"
            )
    return replace(model, metadata={**model.metadata, **(overrides or {})})


def _read_model(path: pathlib.Path) -> GgufModel:
    metadata, tensors = _read_file(path)
    count = metadata.get("split.count", 1)
    match = _SPLIT_NAME.match(path.name)
    if count == 1 or (match is None and count == 0):
        return GgufModel((path,), metadata, tensors)
    if match is None:
        raise ModelFileError(
            f"{path} is one of {count} parts, but its name does not end in -00001-of-{count:05}.gguf: restore the name"
        )
    if int(match["count"]) != count:
        raise ModelFileError(f"{path} is named as one of {int(match['count'])} parts, but says that there are {count}")

    parts = [path.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = next((part for part in parts if not part.is_file()), None)
    if missing is not None:
        raise ModelFileError(f"{missing} is missing: {path.name} is one of {count} parts, and all of them are needed")
    merged: dict[str, StoredTensor] = {}
    first_metadata = metadata
    for i, part in enumerate(parts):
        part_metadata, part_tensors = (metadata, tensors) if part == path else _read_file(part)
        if (part_metadata.get("split.no"), part_metadata.get("split.count")) != (i, count):
            raise ModelFileError(
                f"{part} says that it is part {part_metadata.get('split.no')} of {part_metadata.get('split.count')}, "
                f"but stands where part {i} of {count} belongs"
            )
        twice = next((name for name in part_tensors if name in merged), None)
        if twice is not None:
            raise ModelFileError(f"{part} has a tensor {twice!r} that {merged[twice].file.name} has too")
        merged.update(part_tensors)
        if i == 0:
            first_metadata = part_metadata
    total = first_metadata.get("split.tensors.count", len(merged))
    if total != len(merged):
        raise ModelFileError(f"{parts[0]} says that its parts have {total} tensors, but they have {len(merged)}")
    return GgufModel(tuple(parts), first_metadata, merged)


class _Cursor:
    """A position in a file, with one window of the file in memory. Reading past the end raises ModelFileError."""

    def __init__(self, file: BinaryIO, path: pathlib.Path):
        self.file = file
        self.path = path
        self.size = os.fstat(file.fileno()).st_size
        self.start = 0  # offset of the window in the file
        self.window = b""
        self.pos = 0  # offset in the window
        self.objects = 0  # strings and arrays inside arrays, so far

    def fail(self, message: str) -> ModelFileError:
        """Returns the error to raise, which names the file."""
        return ModelFileError(f"{self.path}: {message}")

    def tell(self) -> int:
        """The position, in bytes from the start of the file."""
        return self.start + self.pos

    def need(self, count: int, what: str) -> None:
        """Loads the next `count` bytes into the window."""
        if self.pos + count <= len(self.window):
            return
        end = self.tell() + count
        if end > self.size:
            raise self.fail(
                f"{what} ends at byte {end}, but the file has {self.size} bytes: it is truncated or damaged"
            )
        if end > MAX_HEADER_BYTES:
            raise self.fail(f"{what} ends at byte {end}, past the {MAX_HEADER_BYTES} bytes that a header may have")
        rest = self.window[self.pos :]
        self.start, self.pos = self.tell(), 0
        room = MAX_HEADER_BYTES - self.start - len(rest)
        self.window = rest + self.file.read(min(max(count - len(rest), _CHUNK), room))
        if len(self.window) < count:
            raise self.fail(f"{what} ends at byte {end}, but only {self.start + len(self.window)} bytes could be read")

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        self.need(count, what)
        taken = self.window[self.pos : self.pos + count]
        self.pos += count
        return taken

    def u32(self, what: str) -> int:
        """The next 4 bytes as a number."""
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        """The next 8 bytes as a number."""
        return int.from_bytes(self.take(8, what), "little")

    def count(self, limit: int, what: str) -> int:
        """Reads a count or length. Raises ModelFileError if it exceeds `limit`."""
        n = self.u64(what)
        if n > limit:
            raise self.fail(f"{what} is {n}, more than the {limit} allowed")
        return n

    def string(self, limit: int, what: str) -> str:
        """Reads a length of at most `limit`, then that number of bytes in UTF-8."""
        n = self.count(limit, f"the length of {what}")
        return self.decode(self.take(n, what), what)

    def decode(self, data: bytes, what: str) -> str:
        """Decodes UTF-8."""
        try:
            return data.decode()
        except UnicodeDecodeError as e:
            raise self.fail(f"{what} is not UTF-8: byte {e.start} of {len(data)} is 0x{data[e.start]:02x}") from None

    def strings(self, n: int, what: str) -> list[str]:
        """Reads `n` strings, each a length and bytes. A tight loop over the window, since a vocabulary is large."""
        result: list[str] = []
        append, unpack, window, pos = result.append, struct.Struct("<Q").unpack_from, self.window, self.pos
        room = len(window) - 8
        try:
            while len(result) < n:
                if pos <= room:
                    (length,) = unpack(window, pos)
                    end = pos + 8 + length
                    if end <= room + 8:
                        append(window[pos + 8 : end].decode())
                        pos = end
                        continue
                self.pos = pos
                append(self.string(MAX_STRING_BYTES, f"string {len(result)} of {what}"))
                window, pos, room = self.window, self.pos, len(self.window) - 8
        except UnicodeDecodeError:
            self.pos = pos
            self.string(MAX_STRING_BYTES, f"string {len(result)} of {what}")  # raises an error with the position
        self.pos = pos
        return result

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """Reads one metadata value of value type `kind`."""
        if kind == _STRING:
            return self.string(MAX_STRING_BYTES, what)
        if kind == _ARRAY:
            return self.array(what, depth + 1)
        dtype = _SCALARS.get(kind)
        if dtype is None:
            raise self.fail(f"{what} has value type {kind}; the known ones are 0 to 12")
        raw = self.take(dtype.itemsize, what)
        return raw != b"\0" if kind == _BOOL else np.frombuffer(raw, dtype)[0].item()

    def array(self, what: str, depth: int) -> Any:
        """Reads an array: a numpy array of numbers, or a list of strings or arrays."""
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(f"{what} is nested {depth} deep, more than the {MAX_ARRAY_DEPTH} allowed")
        kind = self.u32(f"the element type of {what}")
        n = self.count(MAX_ARRAY, f"the length of {what}")
        dtype = _SCALARS.get(kind)
        smallest = dtype.itemsize if dtype is not None else 8 if kind == _STRING else 12
        if n * smallest > self.size - self.tell():
            raise self.fail(
                f"{what} has {n} elements of at least {smallest} bytes, "
                f"but only {self.size - self.tell()} bytes follow: the file is truncated or damaged"
            )
        if dtype is not None:
            raw = self.take(n * dtype.itemsize, what)
            return np.frombuffer(raw, np.uint8) != 0 if kind == _BOOL else np.frombuffer(raw, dtype)
        self.objects += n
        if self.objects > MAX_OBJECTS:
            raise self.fail(f"the arrays up to {what} have {self.objects} strings, more than the {MAX_OBJECTS} allowed")
        if kind == _STRING:
            return self.strings(n, what)
        if kind == _ARRAY:
            return [self.array(what, depth + 1) for _ in range(n)]
        raise self.fail(f"{what} has elements of value type {kind}; the known ones are 0 to 12")


def _read_file(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    try:
        with open_file(path) as file:
            return _read_header(_Cursor(file, path))
    except OSError as e:
        raise ModelFileError(f"{path} cannot be read: {e.strerror or e}") from None


def _read_header(c: _Cursor) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    magic = c.take(4, "the magic number")
    if magic != MAGIC:
        raise c.fail(f"this is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    version = c.u32("the version")
    if version not in (2, 3):
        if int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3):
            raise c.fail(
                f"this GGUF file is big-endian (its version reads 0x{version:08x}): convert it to little-endian"
            )
        raise c.fail(f"GGUF version {version} is not known; the known ones are 2 and 3")
    tensor_count = c.count(MAX_TENSORS, "the number of tensors")
    key_count = c.count(MAX_KEYS, "the number of metadata keys")

    metadata: dict[str, Any] = {}
    for i in range(key_count):
        key = c.string(MAX_NAME_BYTES, f"metadata key {i}")
        if key in metadata:
            raise c.fail(f"metadata key {i}, {key!r}, stands there twice")
        metadata[key] = c.value(c.u32(f"the type of {key!r}"), repr(key))

    alignment = metadata.get("general.alignment", 32)
    power_of_two = type(alignment) is int and 1 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
    if not power_of_two:
        raise c.fail(f"general.alignment is {alignment!r}; it must be a power of two up to {MAX_ALIGNMENT}")
    split_count = metadata.get("split.count", 1)
    if type(split_count) is not int or not 0 <= split_count <= 99999:
        raise c.fail(f"split.count is {split_count!r}; it must be a number up to 99999")

    infos = []
    names: set[str] = set()
    for i in range(tensor_count):
        name = c.string(MAX_NAME_BYTES, f"the name of tensor {i}")
        if name in names:
            raise c.fail(f"tensor {i}, {name!r}, stands there twice")
        names.add(name)
        infos.append((name, *_read_info(c, name)))
    data_start = (c.tell() + alignment - 1) // alignment * alignment

    tensors = {}
    for name, tensor_type, dims, offset in infos:
        if offset % alignment:
            raise c.fail(
                f"tensor {name!r} lies at offset {offset}, which is not a multiple of the alignment {alignment}"
            )
        nbytes = tensor_type.row_bytes(math.prod(dims))
        if data_start + offset + nbytes > c.size:
            raise c.fail(
                f"tensor {name!r} ends at byte {data_start + offset + nbytes}, but the file has {c.size} bytes: "
                "it is truncated or damaged"
            )
        number = -1 if tensor_type is dtypes.I32 else tensor_type.number
        at = data_start + offset
        tensors[name] = StoredTensor(name, number, dims[::-1], c.path, at, tensor_type.name, nbytes)
    return metadata, tensors


def _read_info(c: _Cursor, name: str) -> tuple[dtypes.TensorType, tuple[int, ...], int]:
    """Reads type, dims and offset of one tensor."""
    n_dims = c.u32(f"the number of dimensions of {name!r}")
    if not 1 <= n_dims <= MAX_DIMENSIONS:
        raise c.fail(f"tensor {name!r} has {n_dims} dimensions; it must have 1 to {MAX_DIMENSIONS}")
    dims = tuple(c.u64(f"dimension {i} of {name!r}") for i in range(n_dims))
    for i, n in enumerate(dims):
        if not 1 <= n <= MAX_DIMENSION:
            raise c.fail(f"dimension {i} of tensor {name!r} is {n}; it must be 1 to {MAX_DIMENSION}")
    tensor_type = dtypes.of_number(c.u32(f"the type of {name!r}"), f"{c.path}: tensor {name!r}")
    if dims[0] % tensor_type.block_elements:
        blocks = f"{tensor_type.name} blocks of {tensor_type.block_elements}"
        raise c.fail(f"tensor {name!r} has rows of {dims[0]} elements, which {blocks} do not divide")
    return tensor_type, dims, c.u64(f"the offset of {name!r}")

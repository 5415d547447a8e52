"""Writes GGUF files, version 3: metadata, then tensors, some rows at a time. No whole tensor is kept in memory.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. GGUF types follow the Python types: bool, int
(uint32), float (float32), str, lists of one of these (ints as int32), and numpy arrays of numbers.
"""

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckdist.weights.dtypes import TensorType
from ckdist.weights.gguf import MAGIC

ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _INT64 = 4, 5, 6, 7, 8, 9, 11
_NUMBERS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


class GgufTensorToWrite(NamedTuple):
    """A tensor and the function that makes its data."""

    name: str
    type: TensorType
    shape: tuple[int, ...]  # row-major, the contiguous dimension last
    data: Callable[[], Iterable[np.ndarray]]  # yields uint8 arrays of whole blocks


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[GgufTensorToWrite]) -> int:
    """Writes and syncs the file; returns its size in bytes. Raises OSError if the disk is full."""
    head = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head += [_text(key), _value(value)]
    at = 0
    for t in tensors:
        head.append(
            _text(t.name) + struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *t.shape[::-1], t.type.number, at)
        )
        at += _padded(_size(t))
    header = b"".join(head)
    with open(path, "wb") as file:
        file.write(header + bytes(_padded(len(header)) - len(header)))
        for t in tensors:
            written = sum(file.write(np.ascontiguousarray(part).reshape(-1).data) for part in t.data())
            assert written == _size(t), f"{t.name} has {written} bytes, not {_size(t)}"
            file.write(bytes(_padded(written) - written))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _size(t: GgufTensorToWrite) -> int:
    return t.type.row_bytes(int(np.prod(t.shape, dtype=np.int64)))


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], str):
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
        if value and isinstance(value[0], bool):
            return struct.pack("<IIQ", _ARRAY, _BOOL, len(value)) + np.array(value, np.uint8).tobytes()
        kind, dtype = (_FLOAT32, "<f4") if value and isinstance(value[0], float) else (_INT32, "<i4")
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + np.array(value, dtype).tobytes()
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", _ARRAY, _NUMBERS[value.dtype.str[1:]], len(value)) + value.tobytes()
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value) if 0 <= value < 1 << 32 else struct.pack("<Iq", _INT64, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    return struct.pack("<I", _STRING) + _text(value)

"""Writes safetensors files: a header, then the tensors, one at a time, so that the model is not copied as a whole.

Format: https://github.com/huggingface/safetensors#format.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_CHUNK = 64 << 20  # bytes hashed and written at once


class TensorToWrite(NamedTuple):
    """A tensor and the function that makes its data."""

    name: str
    dtype: str  # F32, F16, BF16
    shape: tuple[int, ...]
    data: Callable[[], np.ndarray]  # returns a contiguous array; bfloat16 as uint16


def write_safetensors(path: Path, tensors: Iterable[TensorToWrite], metadata: dict[str, str] | None = None) -> str:
    """Writes and syncs the file; returns the hex SHA-256 of its bytes. Raises OSError if the disk is full."""
    tensors = list(tensors)
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for t in tensors:
        size = int(np.prod(t.shape, dtype=np.int64)) * ITEM_BYTES[t.dtype]
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        for data in (len(text).to_bytes(8, "little") + text, *(t.data for t in tensors)):
            raw = (
                memoryview(data)
                if isinstance(data, bytes)
                else np.ascontiguousarray(data()).reshape(-1).view(np.uint8).data
            )
            for begin in range(0, len(raw), _CHUNK):
                part = raw[begin : begin + _CHUNK]
                digest.update(part)
                while part:
                    part = part[file.write(part) :]
        os.fsync(file.fileno())
    return digest.hexdigest()


def as_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Converts float32 to `dtype`. bfloat16 is rounded to nearest even and returned as uint16."""
    if dtype == "BF16":
        bits = values.astype(np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype], copy=False)

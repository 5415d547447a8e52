"""The tensors that make up one quantised matrix of a published model, and their checks."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.hub.local_copy import open_file
from ckdist.weights import dtypes
from ckdist.weights.scales import Scales
from ckdist.weights.tensor_source import StoredTensor

UNDIVIDED = 128  # the number of columns that share a scale of 8-bit floats is a multiple of this
FLOATS = ("F32", "F16", "BF16")
INTEGERS = ("I32", "U32")
EXPONENTS = ("U8", "F8_E8M0")  # E8M0: 2 ** (byte - 127)
MAX_ORDER_BYTES = 4 << 20  # of the group indices of a million columns

Joined = tuple[StoredTensor, ...]  # a matrix, then the stored tensors of its parts


def part_of(
    stored: Mapping[str, StoredTensor], name: str, of: StoredTensor, dtypes_read: tuple[str, ...]
) -> StoredTensor:
    """A tensor that `of` requires. Raises ModelFileError if it is missing or has another dtype."""
    part = stored.get(name)
    if part is None:
        raise ModelFileError(f"{of.file}: tensor {of.name!r} has no {name!r}, without which its codes mean nothing")
    if part.dtype not in dtypes_read:
        raise ModelFileError(
            f"{part.file}: tensor {name!r} has dtype {part.dtype}; it must be {' or '.join(dtypes_read)}"
        )
    return part


def expect(settings: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raises ModelFileError, which begins with `where`, for a setting whose value is not `allowed`."""
    for key, values in allowed.items():
        if (value := settings.get(key)) not in values:
            known = " or ".join(repr(known) for known in values if known is not None) or "absent"
            raise ModelFileError(f"{where}: {key} is {str(value)[:40]!r} in quantization_config; it must be {known}")


def shape_error(part: StoredTensor, of: StoredTensor, needed: str) -> ModelFileError:
    """The error of a part whose shape does not fit the codes `of`."""
    return ModelFileError(
        f"{part.file}: tensor {part.name!r} has shape {part.shape}, but {of.name!r} of shape {of.shape} needs {needed}"
    )


def joined_weights(
    name: str, stored: dtypes.TensorType, shape: tuple[int, ...], codes: StoredTensor, scales: Scales
) -> StoredTensor:
    """The matrix `name` of this type and shape."""
    return replace(codes, name=name, type=stored.number, shape=shape, scales=scales)


def int4_type(scales: Scales) -> dtypes.TensorType:
    """The smallest block type that keeps all scales and zero points bit for bit."""
    if scales.cols_each % UNDIVIDED == 0:
        return dtypes.INT4_128Z
    if scales.zeros or scales.form == "f32":
        return dtypes.INT4_32Z
    return dtypes.Q4_0 if scales.form == "f16" else dtypes.INT4_32


def column_order(index: StoredTensor, cols: int, group: int) -> bytes:
    """The stored column of each column if the columns of a group follow one another, int32; empty if they do.

    Raises ModelFileError unless each number of a group stands `group` times in `index`, the last less often.
    """
    numbers = read_numbers(index, (cols,))
    runs = np.arange(cols) // group
    if not (np.sort(numbers) == runs).all():
        raise ModelFileError(
            f"{index.file}: tensor {index.name!r} does not have the number of each group {group} times: "
            f"its numbers go from {numbers.min()} to {numbers.max()}, of {int(runs[-1]) + 1} groups"
        )
    return b"" if (numbers == runs).all() else np.argsort(numbers, kind="stable").astype(np.int32).tobytes()


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is not below n."""
    return -(-n // multiple) * multiple


def read_numbers(tensor: StoredTensor, shape: tuple[int, ...]) -> np.ndarray:
    """Reads a tensor of integers or F32. Raises ModelFileError if it has another shape, is large or cannot be read."""
    if tensor.shape != shape or tensor.nbytes > MAX_ORDER_BYTES:
        raise ModelFileError(f"{tensor.file}: tensor {tensor.name!r} has shape {tensor.shape}; it must be {shape}")
    try:
        with open_file(tensor.file) as file:
            data = os.pread(file.fileno(), tensor.nbytes, tensor.offset)
    except OSError as e:
        raise ModelFileError(f"{tensor.file} cannot be read: {e.strerror or e}") from None
    if len(data) != tensor.nbytes:
        raise ModelFileError(f"{tensor.file}: {tensor.name!r} is cut short: the file is truncated")
    return np.frombuffer(data, {"I64": "<i8", "F32": "<f4"}.get(tensor.dtype, "<i4"))

"""Reads weights as float32, for the start of training, conversions and the numpy reference.

The runtime computes on the stored blocks directly.
"""

import math
import pathlib
from dataclasses import replace

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.hub.local_copy import open_file
from ckdist.native import check, lib, pointer
from ckdist.weights import dtypes
from ckdist.weights.tensor_source import HeadPart, Place, TensorSource


def dequantize(data: np.ndarray, type_number: int, cols: int) -> np.ndarray:
    """Converts `data`, uint8 with whole rows of `cols` elements of a GGUF type, to float32 (rows, cols)."""
    out = np.empty((data.size // dtypes.BY_NUMBER[type_number].row_bytes(cols), cols), np.float32)
    data = np.ascontiguousarray(data)
    stored = pointer(data, "uint8_t *")
    check(lib.ckdist_dequantize(type_number, *out.shape, stored, data.size, pointer(out, "float *")))
    return out


def read_tensor(source: TensorSource) -> np.ndarray:
    """Reads a whole weight as float32, in the row order and with the offset that Hugging Face's name implies.

    Raises:
        ModelFileError: A file has become shorter or cannot be read.
    """
    if not source.matrices:
        return read_rows(source, 0, source.shape[0])
    return np.stack([read_rows(source, 0, source.shape[1], matrix) for matrix in range(source.shape[0])])


def _part_rows(source: TensorSource, part: HeadPart, begin: int, end: int, matrix: int) -> np.ndarray:
    """Rows [begin, end) of a weight that has some rows of each head in a tensor. It reads whole heads."""
    first, last = begin // part.head_rows, -(-end // part.head_rows)
    whole = replace(source, shape=source.stored_shape, part=None)
    values = read_rows(whole, first * part.stored, last * part.stored, matrix)
    heads = values.reshape(-1, part.stored, part.columns)[:, part.first : part.first + part.rows]
    if part.transposed:
        runs = heads.reshape(len(heads), part.rows, -1, part.every, part.width)[:, :, :, part.lane]
        heads = runs.reshape(len(heads), part.rows, -1).swapaxes(1, 2)
    rows = heads.reshape(-1, *source.shape[1:][-1:])
    return rows[begin - first * part.head_rows : end - first * part.head_rows]


def read_rows(source: TensorSource, begin: int, end: int, matrix: int = 0) -> np.ndarray:
    """Reads rows [begin, end) of a matrix or of one matrix of a stack, or elements of a vector.

    Returns float32 (end - begin, ...). Raises the errors of `read_tensor`.
    """
    if source.part:
        return _part_rows(source, source.part, begin, end, matrix)
    row_shape = source.shape[-1:] if len(source.shape) > 1 else ()
    order = np.arange(begin, end) if source.row_order is None else source.row_order[begin:end]
    low, high = (int(order.min()), int(order.max()) + 1) if len(order) else (begin, begin)
    columns, scales = math.prod(row_shape), source.scales

    def read(place: Place, count: int) -> np.ndarray:
        """Reads uint8 (count,) at a place in a file."""
        return stored_bytes(source.name, *place, count)

    path, offset = source.places[matrix]
    if scales:
        values = scales.values((path, offset), source.type, matrix, (low, high), columns, read)
    else:
        row_bytes = dtypes.BY_NUMBER[source.type].row_bytes(columns)
        values = dequantize(read((path, offset + low * row_bytes), (high - low) * row_bytes), source.type, columns)
    values = values.reshape(high - low, *row_shape)
    if source.row_order is not None:
        values = values[order - low]
    if source.exp_sign:
        if not (values * source.exp_sign > 0).all():
            raise ModelFileError(f"{source.file}: tensor {source.name} must be {source.exp_sign} * exp(x) everywhere")
        return np.log(values * source.exp_sign)
    return values + np.float32(1) if source.plus_one else values * np.float32(source.factor)


def stored_bytes(name: str, path: pathlib.Path, offset: int, count: int) -> np.ndarray:
    """Reads uint8 (count,) of the tensor `name` from a file."""
    try:
        with open_file(path) as file:
            file.seek(offset)
            data = np.frombuffer(file.read(count), np.uint8)
    except OSError as e:
        raise ModelFileError(f"{path} cannot be read: {e.strerror or e}") from None
    if data.size != count:
        raise ModelFileError(f"{path}: tensor {name} has {data.size} of its {count} bytes: the file is truncated")
    return data

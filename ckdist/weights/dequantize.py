"""Converts the block formats of GGUF to float32 in numpy: the slow reference definition of the formats.

The runtime computes on the blocks directly. This module is for the numpy reference, the start of training, and tests.
In each function `b` is uint8 (blocks, block_bytes), and the result is float32 (blocks, block_elements). Layouts: ggml's
block structs. Formats with grids are read by the native library, which has the grids.
"""

import pathlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.hub.local_copy import open_file
from ckdist.native import check, lib, pointer
from ckdist.weights import dtypes
from ckdist.weights.scales import E4M3_VALUES
from ckdist.weights.tensor_source import HeadPart, Place, TensorSource

FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # E2M1 values times 2
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def dequantize(data: np.ndarray, type_number: int, cols: int) -> np.ndarray:
    """Converts `data`, uint8 with whole rows of `cols` elements of a GGUF type, to float32 (rows, cols)."""
    tensor_type = dtypes.BY_NUMBER[type_number]
    blocks = np.ascontiguousarray(data).reshape(-1, tensor_type.block_bytes)
    # a damaged scale gives inf or nan without a warning: the caller checks the values
    with np.errstate(over="ignore", invalid="ignore"):
        return _FUNCTIONS[tensor_type](blocks).reshape(-1, cols)


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
        heads = heads.swapaxes(1, 2)[:, part.lane :: part.every]
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
    columns, scales = int(np.prod(row_shape, dtype=np.int64)), source.scales
    row_bytes = scales.code_bytes(columns) if scales else dtypes.BY_NUMBER[source.type].row_bytes(columns)

    def read(place: Place, count: int) -> np.ndarray:
        """Reads uint8 (count,) at a place in a file."""
        return stored_bytes(source.name, *place, count)

    path, offset = source.places[matrix]
    data = read((path, offset + low * row_bytes), (high - low) * row_bytes)
    if scales:
        values = scales.values(data.reshape(high - low, row_bytes), source.type, matrix, (low, high), read)
    else:
        values = dequantize(data, source.type, columns)
    values = values.reshape(high - low, *row_shape)
    if source.row_order is not None:
        values = values[order - low]
    if source.minus_exp:
        if not (values < 0).all():
            raise ModelFileError(f"{source.file}: tensor {source.name} must be below 0 everywhere; it is not")
        return np.log(-values)
    return values + np.float32(1) if source.plus_one else values


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


def _f16(b: np.ndarray) -> np.ndarray:
    """float16 in bytes (blocks, 2 n) -> float32 (blocks, n)."""
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def _nibbles(qs: np.ndarray) -> np.ndarray:
    """Bytes (..., n) -> (..., 2, n): low halves, then high halves."""
    return np.stack([qs & 15, qs >> 4], axis=-2)


def _f32_blocks(b: np.ndarray) -> np.ndarray:
    return b.view("<f4").astype(np.float32)


def _bf16_blocks(b: np.ndarray) -> np.ndarray:
    return (b.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(b: np.ndarray) -> np.ndarray:
    q = _nibbles(b[:, 2:]).reshape(-1, 32)
    return _f16(b[:, :2]) * (q.astype(np.float32) - 8)


def _q4_1(b: np.ndarray) -> np.ndarray:
    q = _nibbles(b[:, 4:]).reshape(-1, 32)
    return _f16(b[:, :2]) * q + _f16(b[:, 2:4])


def _q5_codes(qh: np.ndarray, qs: np.ndarray) -> np.ndarray:
    """5-bit codes (blocks, 32), from 32 high bits and 16 bytes of low nibbles."""
    high = np.unpackbits(qh, axis=1, bitorder="little")
    return (_nibbles(qs).reshape(-1, 32) | high << 4).astype(np.float32)


def _q5_0(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, :2]) * (_q5_codes(b[:, 2:6], b[:, 6:]) - 16)


def _q5_1(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, :2]) * _q5_codes(b[:, 4:8], b[:, 8:]) + _f16(b[:, 2:4])


def _q8_0(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, :2]) * b[:, 2:].view(np.int8)


def _two_bits(qs: np.ndarray) -> np.ndarray:
    """Bytes (blocks, 64) -> codes (blocks, 16 groups, 16). Each half of 32 bytes holds four planes of 2 bits."""
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (qs.reshape(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 16, 16)


def _q2_k(b: np.ndarray) -> np.ndarray:
    scales, q, d, dmin = b[:, :16], _two_bits(b[:, 16:80]), _f16(b[:, 80:82]), _f16(b[:, 82:84])
    return ((d * (scales & 15))[:, :, None] * q - (dmin * (scales >> 4))[:, :, None]).reshape(-1, 256)


def _q3_k(b: np.ndarray) -> np.ndarray:
    hmask, q, packed, d = b[:, :32], _two_bits(b[:, 32:96]), b[:, 96:108], _f16(b[:, 108:110])
    low = _nibbles(packed[:, :8]).reshape(-1, 16)
    high = (packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - 32
    bits = (hmask[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 16, 16)
    codes = (q | bits << 2).astype(np.float32) - 4  # 4 is subtracted if the high bit is 0
    return ((d * scales)[:, :, None] * codes).reshape(-1, 256)


def _scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpacks 12 bytes to eight 6-bit scales and eight 6-bit minima, (blocks, 8) each."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=1)
    minima = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=1)
    return scales, minima


def _k45(b: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Codes (blocks, 8, 32) with the scales and minima of the super-block at the start of `b`."""
    scales, minima = _scales_and_minima(b[:, 4:16])
    d, dmin = _f16(b[:, :2]), _f16(b[:, 2:4])
    return ((d * scales)[:, :, None] * codes - (dmin * minima)[:, :, None]).reshape(-1, 256)


def _q4_k(b: np.ndarray) -> np.ndarray:
    return _k45(b, _nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(b: np.ndarray) -> np.ndarray:
    high = b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _k45(b, _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | high << 4)


def _q6_k(b: np.ndarray) -> np.ndarray:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    return ((_f16(b[:, 208:]) * b[:, 192:208].view(np.int8))[:, :, None] * codes).reshape(-1, 256)


def _iq4_nl(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, :2]) * IQ4_VALUES[_nibbles(b[:, 2:]).reshape(-1, 32)]


def _iq4_xs(b: np.ndarray) -> np.ndarray:
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = _f16(b[:, :2]) * ((low | high << 4).astype(np.float32) - 32)
    return (scales[:, :, None] * IQ4_VALUES[_nibbles(b[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)]).reshape(-1, 256)


def _mxfp4(b: np.ndarray) -> np.ndarray:
    exponent = b[:, :1].astype(np.uint32)  # the scale is 2 ** (exponent - 128); the two smallest are subnormal
    scales = (
        np.where(exponent < 2, np.uint32(1 << 21) << exponent, (exponent - 1) << 23).astype(np.uint32).view(np.float32)
    )
    return scales * FP4_VALUES[_nibbles(b[:, 1:]).reshape(-1, 32)]


def _f8_e4m3(b: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(b[:, :4]).view("<f4") * E4M3_VALUES[b[:, 4:]]


def _int4_32(b: np.ndarray) -> np.ndarray:
    return _bf16_blocks(np.ascontiguousarray(b[:, :2])) * (_nibbles(b[:, 2:]).reshape(-1, 32).astype(np.float32) - 8)


def _int4_z(b: np.ndarray) -> np.ndarray:
    # a float32 whose four lowest bits are replaced by the zero point
    word = np.ascontiguousarray(b[:, :4]).view("<u4")
    codes = _nibbles(b[:, 4:]).reshape(-1, 32).astype(np.float32)
    return (word & ~np.uint32(15)).view(np.float32) * (codes - (word & 15).astype(np.float32))


def _trits(b: np.ndarray, count: int) -> np.ndarray:
    """Bytes (blocks, n), each a fraction of 3^5, -> their first `count` ternary digits less 1, (blocks, count * n)."""
    powers = 3 ** np.arange(count, dtype=np.uint8)[:, None]
    digits = (b[:, None, :] * powers).astype(np.uint16) * 3 >> 8
    return digits.reshape(len(b), -1).astype(np.float32) - 1


def _tq1_0(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, 52:]) * np.concatenate(
        [_trits(b[:, :32], 5), _trits(b[:, 32:48], 5), _trits(b[:, 48:52], 4)], axis=1
    )


def _tq2_0(b: np.ndarray) -> np.ndarray:
    return _f16(b[:, 64:]) * (_two_bits(b[:, :64]).reshape(-1, 256).astype(np.float32) - 1)


def _grid_blocks(tensor_type: dtypes.TensorType) -> Callable[[np.ndarray], np.ndarray]:
    def read(b: np.ndarray) -> np.ndarray:
        """uint8 (blocks, block_bytes) -> float32 (blocks, block_elements)."""
        out = np.empty((len(b), tensor_type.block_elements), np.float32)
        check(
            lib.ckdist_dequantize(
                tensor_type.number, *out.shape, pointer(b, "uint8_t *"), b.size, pointer(out, "float *")
            )
        )
        return out

    return read


_BY_NAME = {
    "F32": _f32_blocks, "F16": _f16, "BF16": _bf16_blocks, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "F8_E4M3": _f8_e4m3,
    "INT4_32": _int4_32, "INT4_32Z": _int4_z, "INT4_128Z": _int4_z,
}  # fmt: skip
_FUNCTIONS = {
    **{dtypes.BY_NAME[name]: function for name, function in _BY_NAME.items()},
    **{t: _grid_blocks(t) for t in dtypes.GRIDS},
}

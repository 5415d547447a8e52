"""Reorders MXFP4 rows of safetensors, with codes and exponents in two tensors, into blocks of GGUF. Values are equal.

A block of 32 columns is its exponent and 16 bytes. Byte i has column i in its low half and column 16 + i in its high
half.
"""

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.weights import dtypes
from ckdist.weights.dequantize import stored_bytes
from ckdist.weights.tensor_source import Place, TensorSource

NOT_A_NUMBER = 255  # exponent of a block without a value


def is_mxfp4(source: TensorSource) -> bool:
    """True if a weight is stored as codes and exponents of MXFP4."""
    return source.type == dtypes.MXFP4.number and source.scales is not None


def block_rows(source: TensorSource, begin: int, end: int, matrix: int = 0) -> np.ndarray:
    """Reads rows [begin, end) of an MXFP4 weight, or of one matrix of a stack: uint8 (end - begin, bytes of a row).

    Raises:
        ModelFileError: A file has become shorter or cannot be read, or an exponent is NaN.
    """
    scales, part, groups = source.scales, source.part, source.shape[-1] // dtypes.MXFP4.block_elements
    assert scales is not None  # checked by `is_mxfp4`
    every, lane = (part.stored, part.first) if part else (1, 0)
    first, count = begin * every, (end - begin) * every

    def rows(place: Place, width: int, before: int = 0) -> np.ndarray:
        """uint8 (end - begin, width) of a tensor with `width` bytes in a row."""
        path, offset = place
        data = stored_bytes(source.name, path, offset + (before + first) * width, count * width)
        return data.reshape(-1, width)[lane::every]

    codes = rows(source.places[matrix], 16 * groups).reshape(end - begin, groups, 16)
    exponents = rows(scales.places[matrix], groups, scales.first_row)
    if (exponents == NOT_A_NUMBER).any():
        path, _ = scales.places[matrix]
        raise ModelFileError(f"{path}: tensor {source.name} has an exponent of {NOT_A_NUMBER}: it is damaged")
    columns = np.stack([codes & 15, codes >> 4], axis=-1).reshape(end - begin, groups, 32)
    halves = columns[..., :16] | columns[..., 16:] << 4
    return np.concatenate([exponents[..., None], halves], axis=-1).reshape(end - begin, -1)

"""Matrices of FP4 (E2M1) in published models, two codes in a byte, with a scale per 16 or 32 columns.

|                                           | codes          | scales                          | factor             |
|-------------------------------------------|----------------|---------------------------------|--------------------|
| mxfp4                                     | name_blocks    | name_scales, powers of 2 for 32 |                    |
| compressed-tensors, mxfp4-pack-quantized  | weight_packed  | weight_scale, the same          |                    |
| compressed-tensors, nvfp4-pack-quantized  | weight_packed  | weight_scale, E4M3 for 16       | 1 / …_global_scale |
| modelopt, NVFP4                           | weight         | weight_scale, E4M3 for 16       | weight_scale_2     |

Scales of activations (`input_scale`, `input_global_scale`) are not used: activations have ckdist's own format.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.weights import dtypes
from ckdist.weights.published_parts import EXPONENTS, Joined, joined_weights, part_of, read_numbers, shape_error
from ckdist.weights.scales import Scales
from ckdist.weights.tensor_source import StoredTensor

COLUMNS = 32  # columns of a block of both types
MOST = 256  # no factor of NVFP4 reaches this: its scales would be above 100,000


def check_modelopt(quantization: Mapping[str, Any], where: str) -> None:
    """Raises ModelFileError unless ModelOpt has quantised matrices to NVFP4."""
    algorithm, size = quantization.get("quant_algo"), quantization.get("group_size")
    if algorithm not in ("NVFP4", "W4A16_NVFP4") or size not in (None, 16):
        raise ModelFileError(
            f"{where} is quantised by modelopt to {str(algorithm)[:40]!r} in groups of {str(size)[:20]}, which is not "
            "read; NVFP4 in groups of 16 is: take the model as it was before, or a GGUF file of it"
        )


def mxfp4(name: str, blocks: StoredTensor, stored: Mapping[str, StoredTensor]) -> Joined:
    """A stack of FP4 matrices, two codes in a byte, with an exponent per 32 columns."""
    stem = name.removesuffix("_blocks")
    part = part_of(stored, f"{stem}_scales", blocks, ("U8",))
    if blocks.dtype != "U8" or len(blocks.shape) < 3 or blocks.shape[-1] != 16 or not math.prod(blocks.shape):
        raise ModelFileError(
            f"{blocks.file}: tensor {name!r} is {blocks.dtype} {blocks.shape}; it must be U8 (…, out, in / 32, 16)"
        )
    if part.shape != blocks.shape[:-1]:
        raise shape_error(part, blocks, f"{blocks.shape[:-1]}")
    *stack, rows, groups = part.shape
    count = math.prod(stack)
    places = tuple((part.file, part.offset + i * rows * groups) for i in range(count))
    scales = Scales("nibbles", "exponent", 1, 32, (rows, groups), places)
    return joined_weights(stem, dtypes.MXFP4, (*stack, rows, 32 * groups), blocks, scales), blocks, part


def packed_fp4(name: str, codes: StoredTensor, stored: Mapping[str, StoredTensor]) -> Joined:
    """The matrix `name`, whose codes are in a tensor of bytes (out, in / 2)."""
    if codes.dtype != "U8" or len(codes.shape) != 2 or not codes.shape[0] or codes.shape[1] % (COLUMNS // 2):
        raise ModelFileError(
            f"{codes.file}: tensor {codes.name!r} is {codes.dtype} {codes.shape}; "
            f"it must be U8 (out, in / 2), with columns in multiples of {COLUMNS}"
        )
    rows, cols = codes.shape[0], 2 * codes.shape[1]
    stem = name.removesuffix("weight")
    names = f"{name}_shape", f"{stem}input_scale", f"{stem}input_global_scale"
    unused = [stored[part] for part in names if part in stored]
    published = next((end for end in ("_scale_2", "_global_scale") if f"{name}{end}" in stored), None)
    part = part_of(stored, f"{name}_scale", codes, ("F8_E4M3",) if published else EXPONENTS)
    group = 16 if published else 32
    if part.shape != (rows, cols // group):
        raise shape_error(part, codes, f"{(rows, cols // group)}")
    place = ((part.file, part.offset),)
    if published is None:
        scales = Scales("nibbles", "exponent", 1, group, (rows, cols // group), place)
        return joined_weights(name, dtypes.MXFP4, (rows, cols), codes, scales), codes, part, *unused
    whole = part_of(stored, f"{name}{published}", codes, ("F32",))
    factor = _factor(whole, inverse=published == "_global_scale")
    scales = Scales("nibbles", "e4m3", 1, group, (rows, cols // group), place, factors=(factor,))
    return joined_weights(name, dtypes.NVFP4, (rows, cols), codes, scales), codes, part, whole, *unused


def _factor(tensor: StoredTensor, inverse: bool) -> float:
    """The number of a tensor, or 1 divided by it. Raises ModelFileError if no scale can be multiplied by it."""
    (value,) = read_numbers(tensor, () if tensor.shape == () else (1,))
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.float32(1) / value if inverse else value
    if not 0 < factor < MOST:
        raise ModelFileError(
            f"{tensor.file}: tensor {tensor.name!r} is {value:g}, so scales would be multiplied by {factor:g}; "
            f"that must be above 0 and below {MOST}: the file is damaged"
        )
    return float(factor)

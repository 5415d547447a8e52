"""Matrices of GPTQ and AWQ, whose 32-bit words of eight codes lie across the rows of a matrix.

|      | words of codes                                       | zero points, per group                     |
|------|------------------------------------------------------|--------------------------------------------|
| gptq | qweight (in / 8, out): eight columns of a row        | qzeros (groups, out / 8), in order         |
| awq  | qweight (in, out / 8): eight rows, 0 2 4 6 1 3 5 7   | qzeros (groups, out / 8), 0 2 4 6 1 3 5 7  |

Both have scales (groups, out). Zero points of GPTQ's first format are stored minus 1 in each field of the word.
"""

import pathlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import ModelFileError
from ckdist.weights import dtypes
from ckdist.weights.json_file import read_json_object
from ckdist.weights.published_parts import (
    FLOATS,
    INTEGERS,
    UNDIVIDED,
    Joined,
    column_order,
    expect,
    int4_type,
    joined_weights,
    part_of,
    round_up,
    shape_error,
)
from ckdist.weights.scales import FORMS, Read, Scales
from ckdist.weights.tensor_source import Place, StoredTensor

ONES = 0x11111111  # 1 in each field of four bits
_OLDER = {  # files that config.json replaced
    "quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt",
}  # fmt: skip
_NAMES = {"bits": ("bits", "w_bit"), "group_size": ("group_size", "q_group_size")}
_VERSIONS = {"gptq": ("checkpoint_format", "format"), "awq": ("version", "format")}


def older_quantization(folder: pathlib.Path) -> dict[str, Any] | None:
    """The quantization_config in a file of its own, as AutoGPTQ, AutoAWQ and ModelOpt saved it; None without a file."""
    for name, method in _OLDER.items():
        if (folder / name).is_file():
            saved = read_json_object(folder / name)
            inner = saved.get("quantization")
            return {"quant_method": method, **(inner if isinstance(inner, dict) else saved)}
    return None


def check_across(quantization: Mapping[str, Any], where: str) -> None:
    """Raises ModelFileError if codes have another size or order than those that are supported."""
    method = str(quantization["quant_method"])
    forms = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}[method]
    allowed = {"bits": (4,), "pack_dtype": ("int32", None), "is_marlin_format": (False, None)}
    expect({key: _setting(quantization, key) for key in allowed}, allowed, where)
    for key in _VERSIONS[method]:
        value = quantization.get(key)
        if value is not None and str(value).lower() not in forms:
            raise ModelFileError(
                f"{where} has matrices of {method} in form {str(value)[:40]!r}, which is not read; "
                f"{' and '.join(forms)} are: convert it, or take a GGUF file of the model"
            )


def across_type(quantization: Mapping[str, Any]) -> dtypes.TensorType:
    """The type of most matrices of such a model."""
    size = _setting(quantization, "group_size")
    if type(size) is not int or size == -1 or size % UNDIVIDED == 0:
        return dtypes.INT4_128Z
    return dtypes.Q4_0 if _is_symmetric(quantization) else dtypes.INT4_32Z


def _is_symmetric(quantization: Mapping[str, Any]) -> bool:
    """True if all zero points are 8, which the loader then checks."""
    return quantization["quant_method"] == "gptq" and quantization.get("sym") is True


def _setting(quantization: Mapping[str, Any], key: str) -> Any:
    return next((quantization[name] for name in _NAMES.get(key, (key,)) if name in quantization), None)


def across(codes: StoredTensor, stored: Mapping[str, StoredTensor], quantization: Mapping[str, Any]) -> Joined:
    """The matrix of a tensor `qweight`."""
    stem = codes.name.removesuffix("qweight")
    awq = quantization["quant_method"] == "awq"
    part = part_of(stored, f"{stem}scales", codes, FLOATS)
    zeros = part_of(stored, f"{stem}qzeros", codes, INTEGERS)
    if codes.dtype not in INTEGERS or len(codes.shape) != 2 or not all(codes.shape):
        needed = "(in, out / 8)" if awq else "(in / 8, out)"
        raise ModelFileError(
            f"{codes.file}: tensor {codes.name!r} is {codes.dtype} {codes.shape}; it must be I32 {needed}"
        )
    cols, rows = (codes.shape[0], 8 * codes.shape[1]) if awq else (8 * codes.shape[0], codes.shape[1])
    if rows % 8 or cols % 32 or part.shape[1:] != (rows,):
        raise shape_error(part, codes, f"({cols} / group, {rows}) with rows of a multiple of 8 and columns of 32")
    groups = part.shape[0]
    group = _group(part, groups, cols, quantization)
    if zeros.shape != (groups, rows // 8):
        raise shape_error(zeros, codes, f"{(groups, rows // 8)}")
    parts = [codes, part, zeros]
    order = b""
    if (index := stored.get(f"{stem}g_idx")) is not None and not awq:
        order = column_order(part_of(stored, index.name, codes, INTEGERS), cols, group)
        parts.append(index)
    places = ((part.file, part.offset),), ((zeros.file, zeros.offset),)
    kind = "rows" if awq else "columns"
    second = awq or "gptq_v2" in (quantization.get("checkpoint_format"), quantization.get("format"))
    scales = Scales(kind, FORMS[part.dtype], 1, group, (rows, groups), *places, zero_added=0 if second else ONES)
    scales = replace(scales, order=order)
    stored_as = int4_type(replace(scales, zeros=()) if _is_symmetric(quantization) else scales)
    return joined_weights(f"{stem}weight", stored_as, (rows, cols), codes, scales), *parts


def _group(part: StoredTensor, groups: int, cols: int, quantization: Mapping[str, Any]) -> int:
    """Columns that share a scale. Raises ModelFileError if no size in the configuration makes this number of groups."""
    own = quantization.get("dynamic")  # rules for some modules
    of_modules = [entry for entry in own.values() if isinstance(entry, dict)] if isinstance(own, dict) else []
    sizes = [_setting(entry, "group_size") for entry in (quantization, *of_modules)]
    for size in sizes:
        if type(size) is int and size == -1 and groups == 1:
            return round_up(cols, UNDIVIDED)
        if type(size) is int and size > 0 and size % 32 == 0 and -(-cols // size) == groups:
            return size
    raise ModelFileError(
        f"{part.file}: tensor {part.name!r} has {groups} groups of {cols} columns, but group_size is "
        f"{' or '.join(str(size)[:20] for size in sizes[:4])} in the configuration, and must be -1 or a multiple of 32"
    )


def across_values(scales: Scales, place: Place, matrix: int, rows: np.ndarray, columns: int, read: Read) -> np.ndarray:
    """The float32 values (rows, columns) of these rows of the tensor at `place`."""
    total, groups = scales.shape
    by_row = scales.codes == "rows"
    fields = np.array([0, 4, 1, 5, 2, 6, 3, 7] if by_row else range(8), np.uint32)
    shifts = 4 * fields[rows % 8]
    words = read(place, total * columns // 2).view("<u4")
    if by_row:
        codes = words.reshape(columns, -1)[:, rows // 8] >> shifts & 15
    else:
        chosen = words.reshape(-1, 1, total)[:, :, rows]
        codes = (chosen >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15).reshape(columns, len(rows))
    zeros = read(scales.zeros[matrix], scales.zero_bytes).view("<u4") + np.uint32(scales.zero_added)
    zeros = zeros.reshape(groups, -1)[:, rows // 8] >> shifts & 15
    stored = scales.floats(read(scales.places[matrix], scales.matrix_bytes)).reshape(groups, total)[:, rows]
    group = scales.groups(columns)
    with np.errstate(over="ignore"):  # a damaged scale may overflow to inf
        return (stored[group] * (codes.astype(np.float32) - zeros[group].astype(np.float32))).T

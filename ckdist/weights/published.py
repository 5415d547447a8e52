"""Quantised matrices of published safetensors models: finds the tensors of codes and scales of each matrix by name.

| quant_method        | tensors of a matrix                                             | supported scales          |
|---------------------|-----------------------------------------------------------------|---------------------------|
| fp8                 | weight (E4M3), weight_scale_inv                                 | blocks, whole matrices    |
| compressed-tensors  | weight (E4M3), weight_scale                                     | blocks, rows, matrices    |
| compressed-tensors  | weight_packed, weight_scale, weight_shape, [weight_zero_point]  | four bits, groups         |
| fp8                 | weight (E4M3, or FP4 in I8), scale, of powers of 2              | blocks, groups of 32      |
| mxfp4, modelopt     | FP4: see `fp4.py`                                               | groups of 32, 16          |
| gptq, awq           | qweight, scales, qzeros, [g_idx]                                | four bits, groups         |

A module that is not quantised is recognised by its tensor: for example, a weight in BF16.
"""

import math
import pathlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckdist.errors import ModelFileError
from ckdist.weights import dtypes
from ckdist.weights.across import across, check_across, older_quantization
from ckdist.weights.fp4 import check_modelopt, mxfp4, packed_fp4
from ckdist.weights.published_parts import (
    EXPONENTS,
    FLOATS,
    INTEGERS,
    UNDIVIDED,
    Joined,
    column_order,
    expect,
    int4_type,
    joined_weights,
    part_of,
    read_numbers,
    round_up,
    shape_error,
)
from ckdist.weights.scales import FORMS, Scales
from ckdist.weights.tensor_source import StoredTensor

READ = "fp8, compressed-tensors of 8-bit floats, 4-bit integers and FP4, mxfp4, modelopt's NVFP4, and gptq and awq"
_FORMS = {  # of compressed-tensors -> the fields of weights
    "float-quantized": {"num_bits": (8,), "type": ("float",)},
    "naive-quantized": {"num_bits": (8,), "type": ("float",)},
    "mxfp8-quantized": {"num_bits": (8,), "type": ("float",), "group_size": (32,)},
    "pack-quantized": {"num_bits": (4,), "type": ("int",)},
    "mxfp4-pack-quantized": {"num_bits": (4,), "type": ("float",), "group_size": (32,)},
    "nvfp4-pack-quantized": {"num_bits": (4,), "type": ("float",), "group_size": (16,)},
}
_PARTS = (
    *(
        f".weight{part}"
        for part in ("_packed", "_scale", "_scale_inv", "_zero_point", "_shape", "_g_idx", "_scale_2", "_global_scale")
    ),
    *(".qweight", ".scales", ".qzeros", ".g_idx"),
)


def check_method(quantization: Mapping[str, Any], where: str) -> str:
    """The quantisation method. Raises ModelFileError, which begins with `where`, if it is not supported."""
    method = quantization.get("quant_method")
    if method == "fp8":
        expect(quantization, {"fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)}, where)
    elif method == "compressed-tensors":
        _check_groups(quantization, where)
    elif method in ("gptq", "awq"):
        check_across(quantization, where)
    elif method in ("modelopt", "modelopt_fp4"):
        check_modelopt(quantization, where)
        method = "modelopt"
    elif method != "mxfp4":
        raise ModelFileError(
            f"{where} is quantised by {str(method)[:40]!r}, which is not read; {READ} are: "
            "take the model as it was before, or a GGUF file of it"
        )
    return str(method)


def _check_groups(quantization: Mapping[str, Any], where: str) -> None:
    """Raises ModelFileError if a group of modules has weights in a form that is not supported."""
    expect(quantization, {"kv_cache_scheme": (None,), "sparsity_config": (None, {})}, where)
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ModelFileError(f"{where}: config_groups is {str(groups)[:60]!r}; it must be an object of objects")
    for group in groups.values():
        form = group.get("format") or quantization.get("format")
        weights = group.get("weights")
        if not isinstance(form, str) or form not in _FORMS or not isinstance(weights, dict):
            raise ModelFileError(f"{where} has matrices of format {str(form)[:40]!r}, which is not read; {READ} are")
        expect(
            weights,
            {**_FORMS[form], "dynamic": (False, None), "actorder": (None, "weight", "static", "group", False)},
            where,
        )
        activations = group.get("input_activations")
        if isinstance(activations, dict) and not activations.get("dynamic"):
            raise ModelFileError(
                f"{where} has scales for its activations (dynamic is {activations.get('dynamic')!r}), "
                "which are not read: take a model whose activations are scaled as it runs"
            )


def join_tensors(
    stored: Mapping[str, StoredTensor], quantization: Mapping[str, Any] | None, where: str
) -> tuple[list[StoredTensor], dict[str, StoredTensor]]:
    """Splits the tensors of a folder into quantised matrices and all other tensors.

    Args:
        quantization: The quantization_config of config.json. None: it is in an older file of the folder `where`.

    Raises:
        ModelFileError: The method is not supported (begins with `where`), or the parts of a matrix are incomplete, do
            not fit together, or have a form that is not supported (names the tensor).
    """
    quantization = quantization or older_quantization(pathlib.Path(where))
    if quantization is None:
        raise ModelFileError(f"{where}: config.json has no quantization_config, but its tensors are quantised")
    method = check_method(quantization, where)
    joined, used = [], set()
    if method == "fp8":
        stored = dict(_usual_name(name, tensor, stored) for name, tensor in stored.items())
    for name, tensor in stored.items():
        if method == "mxfp4":
            found = mxfp4(name, tensor, stored) if name.endswith("_blocks") else None
        elif method in ("gptq", "awq"):
            found = across(tensor, stored, quantization) if name.endswith(".qweight") else None
        elif name.endswith(".weight") and tensor.dtype == "F8_E4M3":
            found = _float8(name, tensor, stored, quantization)
        elif name.endswith(".weight_packed") and tensor.dtype == "U8":
            found = packed_fp4(name.removesuffix("_packed"), tensor, stored)
        elif name.endswith(".weight_packed"):
            found = _int4(name.removesuffix("_packed"), tensor, stored, quantization)
        elif f"{name}_scale_2" in stored and method == "modelopt":
            found = packed_fp4(name, tensor, stored)
        elif method == "fp8" and tensor.dtype in ("I8", "U8") and f"{name}_scale" in stored:
            found = packed_fp4(name, replace(tensor, dtype="U8"), stored)
        else:
            found = None
        if found:
            joined.append(found[0])
            used |= {part.name for part in found[1:]}
    rest = {name: tensor for name, tensor in stored.items() if name not in used}
    for name, tensor in rest.items():
        if name.endswith(_PARTS) or tensor.dtype == "F8_E4M3":
            raise ModelFileError(
                f"{tensor.file}: tensor {name!r} is a part of a quantised matrix whose others are missing"
            )
    return joined, rest


def _usual_name(name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor]) -> tuple[str, StoredTensor]:
    """Renames the scales `name.scale` of `name.weight` (DeepSeek-V4) to `name.weight_scale`."""
    weight = f"{name.removesuffix('.scale')}.weight"
    if not name.endswith(".scale") or weight not in stored:
        return name, tensor
    return f"{weight}_scale", replace(tensor, name=f"{weight}_scale")


def _float8(
    name: str, codes: StoredTensor, stored: Mapping[str, StoredTensor], quantization: Mapping[str, Any]
) -> Joined:
    """A matrix of 8-bit floats, with a scale per block, per row, or for the whole matrix."""
    inverse = f"{name}_scale_inv" in stored
    part = part_of(stored, f"{name}_scale_inv" if inverse else f"{name}_scale", codes, (*FLOATS, *EXPONENTS))
    if len(codes.shape) != 2 or codes.shape[1] % dtypes.F8_E4M3.block_elements or not codes.shape[0]:
        raise ModelFileError(
            f"{codes.file}: tensor {name!r} has shape {codes.shape}; "
            f"a matrix of 8-bit floats must have rows of a multiple of {dtypes.F8_E4M3.block_elements} columns"
        )
    rows, cols = codes.shape
    count = math.prod(part.shape)
    if count == 1:
        shape, each = (1, 1), (rows, round_up(cols, UNDIVIDED))
    elif count == rows and part.shape in ((rows,), (rows, 1)):
        shape, each = (rows, 1), (1, round_up(cols, UNDIVIDED))
    else:
        each = _block_size(quantization, codes)
        shape = (-(-rows // each[0]), -(-cols // each[1]))
        if part.shape != shape:
            raise shape_error(part, codes, f"{shape} of blocks of {each}")
    scales = Scales("bytes", FORMS[part.dtype], *each, shape, ((part.file, part.offset),))
    stored_as = dtypes.F8_E4M3_32 if each[1] % UNDIVIDED else dtypes.F8_E4M3
    return joined_weights(name, stored_as, codes.shape, codes, scales), codes, part


def _block_size(quantization: Mapping[str, Any], codes: StoredTensor) -> tuple[int, int]:
    """Rows and columns of a block that shares a scale."""
    size = quantization.get("weight_block_size")
    groups = quantization.get("config_groups")
    if isinstance(groups, dict):
        every = [group["weights"] for group in groups.values()]
        sizes = [
            each.get("block_structure") or (each.get("strategy") == "group" and [1, each.get("group_size")])
            for each in every
        ]
        size = next((size for size in sizes if size), size)
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(n) is int and 0 < n < 1 << 30 for n in size)
        or size[1] % dtypes.F8_E4M3.block_elements
    ):
        raise ModelFileError(
            f"{codes.file}: {codes.name!r} has scales of blocks of {str(size)[:40]} rows and columns; "
            f"columns must come in multiples of {dtypes.F8_E4M3.block_elements}"
        )
    return size[0], size[1]


def _int4(
    name: str, codes: StoredTensor, stored: Mapping[str, StoredTensor], quantization: Mapping[str, Any]
) -> Joined:
    """A matrix of 4-bit codes, eight in an int32, with a scale per row and group of columns."""
    part = part_of(stored, f"{name}_scale", codes, FLOATS)
    stated = part_of(stored, f"{name}_shape", codes, ("I64", "I32"))
    zeros = stored.get(f"{name}_zero_point")
    if len(codes.shape) != 2 or codes.dtype not in INTEGERS or not codes.shape[0]:
        raise ModelFileError(
            f"{codes.file}: tensor {codes.name!r} is {codes.dtype} {codes.shape}; it must be I32 (out, in / 8)"
        )
    rows, cols = codes.shape[0], codes.shape[1] * 8
    if (says := tuple(read_numbers(stated, (2,)).tolist())) != (rows, cols):
        raise ModelFileError(f"{stated.file}: {stated.name!r} says {says}, but {codes.name!r} holds {(rows, cols)}")
    groups = part.shape[1] if len(part.shape) == 2 else 0
    group = cols // groups if groups and cols % groups == 0 else 0
    if len(part.shape) != 2 or part.shape[0] != rows or not group or group % 32:
        raise shape_error(part, codes, f"({rows}, {cols} / group) with groups of a multiple of 32")
    _check_group(part, group, cols, quantization)
    parts = [codes, part, stated]
    if zeros is not None:
        zeros = part_of(stored, zeros.name, codes, INTEGERS)
        if zeros.shape != (-(-rows // 8), groups):
            raise shape_error(zeros, codes, f"{(-(-rows // 8), groups)}")
        parts.append(zeros)
    each = round_up(group, UNDIVIDED) if groups == 1 else group
    order = b""
    if (index := stored.get(f"{name}_g_idx")) is not None:
        order = column_order(part_of(stored, index.name, codes, INTEGERS), cols, group)
        parts.append(index)
    zero_places = ((zeros.file, zeros.offset),) if zeros else ()
    scales = Scales(
        "nibbles", FORMS[part.dtype], 1, each, part.shape, ((part.file, part.offset),), zero_places, order=order
    )
    return joined_weights(name, int4_type(scales), (rows, cols), codes, scales), *parts


def _check_group(part: StoredTensor, group: int, cols: int, quantization: Mapping[str, Any]) -> None:
    """Raises ModelFileError if no group of modules in config.json has groups of `group` columns."""
    sizes = [modules["weights"].get("group_size") for modules in quantization["config_groups"].values()]
    if not any(size == group or (size in (None, -1) and group == cols) for size in sizes):
        stated = " or ".join(str(size)[:20] for size in sizes)
        raise ModelFileError(
            f"{part.file}: tensor {part.name!r} has scales of {group} columns, but group_size is {stated} in "
            "config.json: one of the two files is damaged or another model's; fetch both again"
        )

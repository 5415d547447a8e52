"""Makes tests/golden/formats: a small matrix in each quantised form of safetensors, and its values in float32 by torch,
compressed-tensors, transformers and AutoAWQ.

    pip install torch transformers compressed-tensors && pip download --no-deps --no-binary :all: autoawq==0.2.9
    python tests/golden/make_formats_golden.py autoawq-0.2.9/awq/utils/packing_utils.py

GPTQ's values are by its published formula, scale * (code - zero point), written here with torch.

FORMAT.safetensors holds the tensors as a model has them, `linear.weight…` or `linear_blocks`; values.json the SHA-256
of the float32 that they mean, (rows, cols) or (matrices, rows, cols), with zeros that have no sign.
"""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import NaiveQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT = Path(__file__).parent / "formats"
VALUES: dict[str, str] = {}
ROWS, COLS = 150, 416  # which blocks of 128 do not divide

INT4 = {  # group (None: a row), symmetric, dtype of the scales
    "int4-32-bf16": (32, True, torch.bfloat16),
    "int4-32-f16": (32, True, torch.float16),
    "int4-32-zero": (32, False, torch.bfloat16),
    "int4-128-bf16": (128, True, torch.bfloat16),
    "int4-128-zero-f16": (128, False, torch.float16),
    "int4-row": (None, True, torch.bfloat16),
}


def int4(rng: torch.Generator, group: int | None, symmetric: bool, dtype: torch.dtype) -> tuple[dict, torch.Tensor]:
    """The tensors and their values."""
    cols = 3 * 128 if group == 128 else COLS
    weight = torch.randn(ROWS, cols, generator=rng) * 0.02
    groups = weight.reshape(ROWS, -1, group or cols)
    spread = groups.amax(-1) - groups.amin(-1)
    scale = (groups.abs().amax(-1) / 7.5 if symmetric else spread / 15).to(dtype)
    zero = None if symmetric else (-8 - groups.amin(-1) / scale.float()).round().clamp(-8, 7).to(torch.int8)
    args = QuantizationArgs(
        num_bits=4, type="int", symmetric=symmetric, strategy="group" if group else "channel", group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
    state = PackedQuantizationCompressor.compress({k: v for k, v in state.items() if v is not None}, scheme)
    values = PackedQuantizationCompressor.decompress(dict(state), scheme)["weight"]
    return state | {"weight_scale": scale}, values


def float8(rng: torch.Generator, strategy: str, dtype: torch.dtype) -> tuple[dict, torch.Tensor]:
    """A scale for a matrix (tensor), a row (channel) or a block of 128 x 128 (block)."""
    weight = torch.randn(ROWS, COLS, generator=rng) * 0.02
    weight[0, :16] = torch.arange(16) * 1e-6  # subnormal codes
    if strategy == "block":
        padded = torch.zeros(256, 512)
        padded[:ROWS, :COLS] = weight
        scale = (padded.reshape(2, 128, 4, 128).abs().amax((1, 3)) / 448).to(dtype)
        each = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:ROWS, :COLS]
        codes = (weight / each).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * each
    scale = (weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().reshape(1)) / 440
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy=strategy)
    )
    state = {"weight": weight, "weight_scale": scale.to(dtype).float()}
    state = NaiveQuantizationCompressor.compress(state, scheme)
    values = NaiveQuantizationCompressor.decompress(dict(state), scheme)["weight"]
    return state | {"weight_scale": scale.to(dtype)}, values


ACROSS = {  # group (None: a row), symmetric, added to zero points as they are stored
    "gptq-32": (32, True, -1),
    "gptq-128": (128, False, 0),
    "gptq-row": (None, False, -1),
}
SHIFTS = torch.arange(0, 32, 4)


def words(nibbles: torch.Tensor) -> torch.Tensor:
    """int32 (..., n / 8) of codes (..., n), the first in the lowest bits."""
    whole = (nibbles.long().unflatten(-1, (-1, 8)) << SHIFTS).sum(-1)
    return whole.where(whole < 1 << 31, whole - (1 << 32)).int()


def gptq(rng: torch.Generator, group: int | None, symmetric: bool, added: int) -> tuple[dict, torch.Tensor]:
    """The tensors of GPTQ and their values. Columns of a last group may be missing."""
    rows, cols = 40, COLS
    order = torch.arange(cols) // (group or cols)
    codes = torch.randint(0, 16, (cols, rows), generator=rng)
    zeros = torch.randint(1, 16, (int(order[-1]) + 1, rows), generator=rng)
    zeros = torch.full_like(zeros, 8) if symmetric else zeros
    scales = (torch.rand(zeros.shape, generator=rng) * 0.01 + 0.001).half()
    tensors = {"qweight": words(codes.T).T, "qzeros": words(zeros + added), "scales": scales, "g_idx": order.int()}
    shift = SHIFTS.int()
    stored = tensors["qweight"].unsqueeze(1) >> shift[None, :, None] & 15  # (cols / 8, 8, rows)
    points = (tensors["qzeros"].unsqueeze(-1) >> shift & 15).flatten(1) - added
    return tensors, (scales[order].float() * (stored.flatten(0, 1) - points[order]).float()).T


def awq(rng: torch.Generator, group: int, path: str) -> tuple[dict, torch.Tensor]:
    """The tensors of AWQ in its order "gemm", and their values by AutoAWQ's packing_utils.py at `path`."""
    spec = importlib.util.spec_from_file_location("packing_utils", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows, cols = 40, 384
    any_word = lambda *shape: torch.randint(-(1 << 31), 1 << 31, shape, generator=rng).int()
    tensors = {"qweight": any_word(cols, rows // 8), "qzeros": any_word(cols // group, rows // 8)}
    tensors["scales"] = (torch.rand((cols // group, rows), generator=rng) * 0.01 + 0.001).half()
    values = module.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, group)
    return tensors, values.T


FP4 = {  # scheme, columns per scale, whole factor
    "mxfp4pack": ("mxfp4", 32, None),
    "nvfp4": ("nvfp4", 16, 64.0),  # a power of two, whose reciprocal has no error
}


def fp4(rng: torch.Generator, group: int, factor: float | None) -> tuple[dict, torch.Tensor]:
    """The tensors of compressed-tensors' packed FP4 and their values."""
    rows, cols = 40, COLS
    args = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group" if factor else "group", group_size=group
    )
    tensors = {"weight_packed": torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8, generator=rng)}
    shape = (rows, cols // group)
    if factor:
        codes = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=rng)  # subnormal ones too, no NaN
        tensors["weight_scale"] = codes.view(torch.float8_e4m3fn)
        tensors["weight_global_scale"] = torch.tensor([factor])
        tensors["input_global_scale"] = torch.tensor([3.0])
        scale = tensors["weight_scale"].float()
    else:
        tensors["weight_scale"] = torch.randint(110, 130, shape, dtype=torch.uint8, generator=rng)
        scale = decompress_mx_scale(tensors["weight_scale"]).float()
    plain = unpack_fp4_from_uint8(tensors["weight_packed"], rows, cols, torch.float32)
    whole = tensors.get("weight_global_scale")
    return tensors, dequantize(plain, scale, args=args, global_scale=whole, dtype=torch.float32)


def modelopt(tensors: dict, factor: float) -> tuple[dict, torch.Tensor]:
    """The same codes with another factor as ModelOpt names them, and their values by its formula."""
    rows, cols = 40, COLS
    named = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
    named |= {"weight_scale_2": torch.tensor(factor), "input_scale": torch.tensor(0.5)}
    scale = named["weight_scale"].float() * named["weight_scale_2"]
    plain = unpack_fp4_from_uint8(named["weight"], rows, cols, torch.float32)
    return named, plain * scale.repeat_interleave(16, 1)


def write(name: str, state: dict, values: torch.Tensor, prefix: str = "linear.") -> None:
    """One format's file, and what it means."""
    save_file({prefix + key: value.contiguous() for key, value in state.items()}, OUT / f"{name}.safetensors")
    VALUES[name] = hashlib.sha256((values.float().contiguous().numpy() + np.float32(0)).tobytes()).hexdigest()


def main() -> None:
    """Writes all."""
    OUT.mkdir(exist_ok=True)
    rng = torch.Generator().manual_seed(0)
    for name, (group, symmetric, dtype) in INT4.items():
        write(name, *int4(rng, group, symmetric, dtype))
    write("fp8-block", *float8(rng, "block", torch.float32))
    write("fp8-block-bf16", *float8(rng, "block", torch.bfloat16))
    write("fp8-row", *float8(rng, "channel", torch.bfloat16))
    write("fp8-matrix", *float8(rng, "tensor", torch.float32))
    blocks = torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8, generator=rng)
    scales = torch.randint(110, 130, (3, 40, 5), dtype=torch.uint8, generator=rng)
    scales[0, 0] = torch.tensor([0, 1, 2, 254, 127], dtype=torch.uint8)  # of which two are subnormal numbers
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)  # to (matrices, out, in)
    write("mxfp4", {"linear_blocks": blocks, "linear_scales": scales}, values, "")
    for name, (group, symmetric, added) in ACROSS.items():
        write(name, *gptq(rng, group, symmetric, added))
    for group in (32, 128):
        write(f"awq-{group}", *awq(rng, group, sys.argv[1]))
    for name, (_, group, factor) in FP4.items():
        state, values = fp4(rng, group, factor)
        write(name, state, values)
    write("modelopt", *modelopt(state, 3.7e-5))
    codes = torch.randint(0, 0x7F, (40, COLS), dtype=torch.uint8, generator=rng)
    for rows, form, name in ((1, "U8", "weight_scale"), (32, "F8_E8M0", "weight_scale_inv")):
        exponents = torch.randint(110, 130, (-(-40 // rows), COLS // 32), dtype=torch.uint8, generator=rng)
        each = exponents.view(torch.float8_e8m0fnu).float()
        each = each.repeat_interleave(rows, 0).repeat_interleave(32, 1)[:40]
        scales = exponents.view(torch.float8_e8m0fnu) if form != "U8" else exponents
        plain = codes.view(torch.float8_e4m3fn)
        write(f"mxfp8-{rows}", {"weight": plain, name: scales}, plain.float() * each)
    (OUT / "values.json").write_text(json.dumps(VALUES, indent=1) + "\n")


if __name__ == "__main__":
    main()

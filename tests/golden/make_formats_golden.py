"""Makes tests/golden/formats: a small matrix in each quantised form of safetensors, and its values in float32 by torch,
compressed-tensors and transformers.

    pip install torch transformers compressed-tensors && python tests/golden/make_formats_golden.py

FORMAT.safetensors holds the tensors as a model has them, `linear.weight…` or `linear_blocks`; values.json the SHA-256
of the float32 that they mean, (rows, cols) or (matrices, rows, cols), with zeros that have no sign.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import NaiveQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
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
    (OUT / "values.json").write_text(json.dumps(VALUES, indent=1) + "\n")


if __name__ == "__main__":
    main()

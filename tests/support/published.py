"""Small models in the quantised forms of safetensors, with the same values in float32 beside them."""

import functools
import json

import numpy as np
from safetensors.numpy import save_file

from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import spec_from_config
from ckdist.weights.scales import E4M3_VALUES

CONFIG = {  # 416 columns: blocks of 128 do not divide them, nor do two or three ranks evenly
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 416, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


def packed(**weights) -> dict:
    """quantization_config of four bits, with these settings of its weights."""
    groups = {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS | weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def packed_fp4(kind: str, group: int, form: str = "", **more) -> dict:
    """quantization_config of compressed-tensors' FP4, nvfp4 or mxfp4, or another form with groups of floats."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group, **more}
    groups = {"group_0": {"weights": weights, "input_activations": {"dynamic": "local", "num_bits": 4}}}
    return {"quant_method": "compressed-tensors", "format": form or f"{kind}-pack-quantized", "config_groups": groups}


MIXTURE = CONFIG | {  # all experts are taken, so that rounding changes no choice
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 4,
    "moe_intermediate_size": 160, "norm_topk_prob": True,
}  # fmt: skip
FORMS = {
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8-row": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    },
    "int4-32": packed(group_size=32),
    "int4-32-zero": packed(group_size=32, symmetric=False),
    "int4-row-zero": packed(strategy="channel", symmetric=False),
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
    "gptq-32": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "gptq-32-order": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True},
    "awq-32-zero": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
}

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, and what the file holds


def plain(array: np.ndarray) -> Tensor:
    """A tensor of float32."""
    return "F32", array.shape, np.ascontiguousarray(array, "<f4").tobytes()


def write_tensors(path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 without the bits that bfloat16 has not."""
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def stored_bf16(values: np.ndarray) -> Tensor:
    """A tensor of bfloat16."""
    return "BF16", values.shape, (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def quantised(form: str, name: str, weight: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
    """The tensors of one matrix, float32 (out, in), and the values that they mean."""
    rows, cols = weight.shape
    if form.startswith("fp8"):
        block = (128, 128) if form == "fp8-block" else (1, cols)
        shape = -(-rows // block[0]), -(-cols // block[1])
        padded = np.zeros((shape[0] * block[0], shape[1] * block[1]), np.float32)
        padded[:rows, :cols] = weight
        scales = np.abs(padded).reshape(shape[0], block[0], shape[1], block[1]).max((1, 3)) / np.float32(448)
        scales = bf16(scales)
        each = scales.repeat(block[0], 0).repeat(block[1], 1)[:rows, :cols]
        codes = _e4m3_codes()[(weight / each).view(np.uint32) >> 16]
        suffix = "_scale_inv" if form == "fp8-block" else "_scale"
        tensors = {name: ("F8_E4M3", (rows, cols), codes.tobytes()), name + suffix: stored_bf16(scales)}
        return tensors, each * E4M3_VALUES[codes]
    if form == "nvfp4":
        return _nvfp4(name, weight)
    group = 32 if "32" in form else 128 if "128" in form else cols
    if form.endswith("-order"):  # columns of one input have one order
        order = np.random.default_rng(cols + ("o_proj" in name)).permutation(cols)
        tensors, values = quantised(form.removesuffix("-order"), name, weight[:, order])
        stem, stored = name.removesuffix("weight"), np.argsort(order)
        words = np.frombuffer(tensors[stem + "qweight"][2], "<u4").reshape(-1, rows)
        codes = (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15).reshape(cols, rows)[stored]
        words = (codes.reshape(-1, 8, rows) << np.arange(0, 32, 4, dtype=np.uint32)[:, None]).sum(1).astype("<u4")
        tensors[stem + "qweight"] = "I32", words.shape, words.tobytes()
        tensors[stem + "g_idx"] = "I32", (cols,), (stored // group).astype("<i4").tobytes()
        return tensors, np.ascontiguousarray(values[:, stored])
    groups = weight.reshape(rows, -1, group)
    zeros = np.full(groups.shape[:2], 8)
    scales = bf16(np.abs(groups).max(-1) / 7.5)
    if "zero" in form:
        scales = bf16((groups.max(-1) - groups.min(-1)) / 15)
        zeros = np.rint(-groups.min(-1) / scales).clip(0, 15).astype(int)
    codes = (np.rint(groups / scales[..., None]) + zeros[..., None]).clip(0, 15).astype(np.uint32).reshape(rows, cols)
    words = lambda nibbles: (nibbles.reshape(*nibbles.shape[:-1], -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)).sum(
        -1
    )
    values = scales[..., None] * (codes.reshape(groups.shape).astype(np.float32) - zeros[..., None].astype(np.float32))
    values = values.reshape(rows, cols).astype(np.float32)
    if not form.startswith("int4"):
        return _across(form, name, words, codes, scales, zeros.astype(np.uint32)), values
    tensors = {
        name + "_packed": ("I32", (rows, cols // 8), words(codes).astype("<u4").tobytes()),
        name + "_scale": stored_bf16(scales),
        name + "_shape": ("I64", (2,), np.array([rows, cols], "<i8").tobytes()),
    }
    if "zero" in form:
        columns = np.pad(zeros, ((0, -rows % 8), (0, 0))).T.astype(np.uint32)  # (groups, rows)
        packed = words(columns).T.astype("<u4")
        tensors[name + "_zero_point"] = ("I32", packed.shape, np.ascontiguousarray(packed).tobytes())
    return tensors, values


@functools.cache
def _e4m3_codes() -> np.ndarray:
    """The code of each bfloat16, rounded up: uint8 (65536,)."""
    numbers = np.nan_to_num((np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32))
    ordered = np.argsort(np.nan_to_num(E4M3_VALUES, nan=1e9))[:254]
    return ordered[np.searchsorted(E4M3_VALUES[ordered], numbers).clip(0, 253)].astype(np.uint8)


def _nvfp4(name: str, weight: np.ndarray) -> tuple[dict[str, Tensor], np.ndarray]:
    """The tensors of a matrix of ModelOpt's NVFP4, and their values."""
    rows, cols = weight.shape
    groups = weight.reshape(rows, -1, 16)
    factor = np.float32(np.abs(weight).max() / (448 * 6))
    ordered = E4M3_VALUES[:127]
    scales = np.searchsorted(ordered, np.abs(groups).max(-1) / (6 * factor)).clip(1, 126).astype(np.uint8)
    each = ordered[scales][..., None] * factor
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    nearest = np.abs(np.abs(groups)[..., None] / each[..., None] - magnitudes).argmin(-1).astype(np.uint8)
    codes = (nearest | (groups < 0) * np.uint8(8)).reshape(rows, cols)
    values = (each * np.where(groups < 0, -1, 1) * magnitudes[nearest]).reshape(rows, cols).astype(np.float32)
    number = lambda value: ("F32", (), np.float32(value).tobytes())
    return {
        name: ("U8", (rows, cols // 2), (codes[:, ::2] | codes[:, 1::2] << 4).tobytes()),
        name + "_scale": ("F8_E4M3", scales.shape, scales.tobytes()),
        name + "_scale_2": number(factor),
        name.removesuffix("weight") + "input_scale": number(0.3),
    }, values


def _across(form: str, name: str, words, codes, scales: np.ndarray, zeros: np.ndarray) -> dict[str, Tensor]:
    """The tensors of a matrix of GPTQ's first format or of AWQ. `codes` (rows, cols), `zeros` (rows, groups)."""
    stem, cols = name.removesuffix("weight"), codes.shape[1]
    order = lambda rows: rows.reshape(*rows.shape[:-1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(rows.shape)
    if form.startswith("awq"):
        packed, points = words(order(codes.T)), words(order(zeros.T))
    else:
        packed, points = words(codes).T, words(zeros.T - 1)
    bytes_of = lambda array: ("I32", array.shape, np.ascontiguousarray(array.astype("<u4")).tobytes())
    tensors = {stem + "qweight": bytes_of(packed), stem + "qzeros": bytes_of(points)}
    tensors[stem + "scales"] = "F16", scales.T.shape, np.ascontiguousarray(scales.T).astype("<f2").tobytes()
    if form.startswith("gptq"):
        tensors[stem + "g_idx"] = bytes_of(np.arange(cols) // (cols // scales.shape[1]))
    return tensors


def write_published(folder, form: str, config: dict = CONFIG) -> None:
    """`folder`/quantised: a random model whose projections have this form; `folder`/plain: its values in float32."""
    method = FORMS.get(form) or FORMS[form.replace("128", "32")] | {"group_size": 128}
    _write_both(folder, config, method, *_published(form, json.dumps(config)))


@functools.lru_cache(6)
def _published(form: str, config: str) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """The tensors of a random model whose projections have this form, and their values in float32."""
    rng = np.random.default_rng(0)
    shapes = weight_shapes(spec_from_config(json.loads(config), "config"))
    stored, values = {}, {}
    for name, shape in shapes.items():
        array = bf16(np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) / 16)
        if len(shape) == 3:  # experts, one by one
            for i, matrix in enumerate(array):
                tensors, array[i] = quantised(form, name.replace(".experts.", f".experts.{i}."), matrix)
                stored |= tensors
        elif "_proj." in name and len(shape) == 2:
            tensors, array = quantised(form, name, array)
            stored |= tensors
        else:
            stored[name] = stored_bf16(array)
        values[name] = array
    return stored, values


def _write_both(folder, config: dict, quantization: dict, stored: dict[str, Tensor], values: dict) -> None:
    """The quantised model, and its values."""
    for kind in ("quantised", "plain"):
        (folder / kind).mkdir(parents=True)
    write_tensors(folder / "quantised" / "model.safetensors", stored)
    save_file(values, folder / "plain" / "model.safetensors")
    (folder / "quantised" / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    (folder / "plain" / "config.json").write_text(json.dumps(config))


LATENT = {  # all experts are taken here too
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 256,
    "intermediate_size": 416, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
    "q_lora_rank": 160, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 96,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 160, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "vocab_size": 96, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip


def latent_shapes() -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of `LATENT`, as DeepSeek publishes them."""
    found = {"model.embed_tokens": (96, 256), "model.norm": (256,), "lm_head": (96, 256)}
    mlp = lambda path, size: (
        {f"{path}.{part}_proj": (size, 256) for part in ("gate", "up")} | {f"{path}.down_proj": (256, size)}
    )
    for layer in range(2):
        path = f"model.layers.{layer}"
        found |= {f"{path}.input_layernorm": (256,), f"{path}.post_attention_layernorm": (256,)}
        of_attention = {
            "q_a_proj": (160, 256), "q_a_layernorm": (160,), "q_b_proj": (3 * 96, 160),
            "kv_a_proj_with_mqa": (160, 256), "kv_a_layernorm": (128,), "kv_b_proj": (3 * 160, 128),
            "o_proj": (256, 288),
        }  # fmt: skip
        found |= {f"{path}.self_attn.{name}": shape for name, shape in of_attention.items()}
        if layer == 0:
            found |= mlp(f"{path}.mlp", 416)
            continue
        found |= {f"{path}.mlp.gate": (4, 256)} | mlp(f"{path}.mlp.shared_experts", 160)
        for expert in range(4):
            found |= mlp(f"{path}.mlp.experts.{expert}", 160)
    return {f"{name}.weight": shape for name, shape in found.items()} | {
        "model.layers.1.mlp.gate.e_score_correction_bias": (4,)
    }


def write_latent(folder, form: str) -> None:
    """As `write_published`, with latent attention: DeepSeek-V3's form, where every projection is quantised, and of
    Kimi-K2.5, where experts are and the model stands in a multimodal one.
    """
    rng, kimi = np.random.default_rng(0), form.startswith("int4")
    prefix = "language_model." if kimi else ""
    stored, values = {}, {}
    for name, shape in latent_shapes().items():
        array = bf16(np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) / 16)
        if ".mlp.experts." in name or ("_proj" in name and not kimi):
            tensors, array = quantised(form, prefix + name, array)
            stored |= tensors
        else:
            stored[prefix + name] = stored_bf16(array)
        values[prefix + name] = array
    config, quantization = LATENT, FORMS[form]
    if kimi:
        outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
        config = outer | {"text_config": LATENT | {"architectures": ["KimiK2ForCausalLM"], "model_type": "kimi_k2"}}
        quantization = quantization | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]}
    _write_both(folder, config, quantization, stored, values)


STACKS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "sliding_window": 20, "num_local_experts": 3, "num_experts_per_tok": 3, "max_position_embeddings": 512,
}  # fmt: skip


def fp4(rng, rows, columns):
    """Blocks and scales of three matrices as they are published, and their values, (matrices, rows, columns)."""
    blocks = rng.integers(0, 256, (3, rows, columns // 32, 16), np.uint8)
    scales = rng.integers(121, 125, (3, rows, columns // 32), np.uint8)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.concatenate([magnitudes, -magnitudes])[
        np.stack([blocks & 15, blocks >> 4], -1).reshape(3, rows, -1, 32)
    ]
    values = values * 2.0 ** (scales.astype(int)[..., None] - 127)
    return blocks, scales, values.reshape(3, rows, columns).astype(np.float32)


def write_stacks(folder) -> None:
    """As `write_published`, of gpt-oss with stacks of experts in MXFP4."""
    rng = np.random.default_rng(3)
    shapes = weight_shapes(spec_from_config(STACKS, "config"))
    values = {
        name.replace(".mlp.gate.", ".mlp.router."): (rng.standard_normal(shape) * 0.25).astype(np.float32)
        for name, shape in shapes.items() if ".experts." not in name
    }  # fmt: skip
    tensors = {name: plain(value) for name, value in values.items()}
    bytes_of = lambda array: ("U8", array.shape, array.tobytes())
    for layer in range(2):
        for name, rows, columns in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            path = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales, matrices = fp4(rng, rows, columns)
            tensors[path + "_blocks"], tensors[path + "_scales"] = bytes_of(blocks), bytes_of(scales)
            values[path] = np.ascontiguousarray(matrices.swapaxes(1, 2))
            values[path + "_bias"] = rng.standard_normal((3, rows)).astype(np.float32)
            tensors[path + "_bias"] = plain(values[path + "_bias"])
    _write_both(folder, STACKS, {"quant_method": "mxfp4"}, tensors, values)

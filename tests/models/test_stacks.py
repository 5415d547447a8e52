"""Stacks of matrices in files: as one tensor, matrix by matrix, and what is wrong with them."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckdist.errors import ModelFileError
from ckdist.native import ffi
from ckdist.train.stored_tensors import stored_tensors
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.loader import ShardLoader
from tests.support.paths import GOLDEN

FOLDER = GOLDEN / "qwen3moe"
WRITTEN = [
    "mixtral",
    "qwen3moe",
    "qwen2moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4moe",
    "glm4_moe_lite",
    "bailing_moe_v2",
]
WRITTEN += [
    "dots1",
    "ernie4_5_moe",
    "granitemoe",
    "granite4",
    "granite4_moe",
    "hunyuan_v1_moe",
    "mistral4",
    "qwen3vlmoe",
]
GATE = "model.layers.0.mlp.experts.gate_proj.weight"
DOWN = "model.layers.0.mlp.experts.down_proj.weight"
STORED = "model.layers.0.mlp.experts.{}.{}_proj.weight"


@pytest.mark.parametrize("family, last", [("qwen3moe", 7), ("gptoss", 4)])
def test_parts_of_a_stack_are_packed_as_they_are_stored(family, last):
    """Rows, columns and matrices of a stack, each of which begins with a tile of its own; of gpt-oss they lie by turns,
    and transposed.
    """
    checkpoint = open_checkpoint(GOLDEN / family)
    loader = ShardLoader(checkpoint, 2)
    parts = [(GATE, (3, 36), (0, 64), None), (GATE, (1, 2), (16, 48), (0, 2)), (DOWN, (0, 64), (32, 36), (2, last))]
    handles = [loader.add_matrix(name, [rows], columns, stack) for name, rows, columns, stack in parts]
    loader.load(progress=False)
    for handle, (name, rows, columns, stack) in zip(handles, parts, strict=True):
        expected = read_tensor(checkpoint.tensors[name])[slice(*(stack or (None,))), slice(*rows), slice(*columns)]
        matrix = ffi.cast("struct ckdist_matrix *", handle.address)
        tiles = -(-expected.shape[1] // 16)
        assert matrix.rows == 16 * tiles * len(expected)
        width = -(-expected.shape[2] // 16) * 16  # columns of a tile of float32
        packed = np.frombuffer(ffi.buffer(matrix.tiles, tiles * len(expected) * matrix.tile_bytes), np.float32)
        packed = packed.reshape(len(expected), tiles, width, 16).swapaxes(2, 3).reshape(len(expected), -1, width)
        np.testing.assert_array_equal(packed[:, : expected.shape[1], : expected.shape[2]], expected)
        assert not packed[:, expected.shape[1] :].any()
    loader.close()


def test_one_tensor_with_gate_and_up_is_the_same_model(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "m", copy_function=shutil.copyfile)
    tensors = load_file(FOLDER / "model.safetensors")
    for layer in (0, 2):
        path = f"model.layers.{layer}.mlp.experts"
        part = lambda name, path=path: np.stack([tensors.pop(f"{path}.{e}.{name}_proj.weight") for e in range(9)])
        gate, up, down = map(part, ("gate", "up", "down"))
        tensors |= {f"{path}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{path}.down_proj": down}
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    one, other = open_checkpoint(FOLDER), open_checkpoint(tmp_path / "m")
    for name, source in one.tensors.items():
        np.testing.assert_array_equal(read_tensor(source), read_tensor(other.tensors[name]), err_msg=name)


@pytest.mark.parametrize("family", WRITTEN)
def test_weights_go_back_to_files_as_they_came(family):
    """Names, shapes and values: stacks expert by expert, biases of choices, both parts of kv_b."""
    checkpoint = open_checkpoint(GOLDEN / family)
    weights = {source.name: read_tensor(source) for source in checkpoint.tensors.values()}
    written = {t.name: t for t in stored_tensors(checkpoint.spec, weights)}
    files = load_file(GOLDEN / family / "model.safetensors")
    stored = {name.replace(".language_model", ""): array for name, array in files.items() if ".visual." not in name}
    assert set(written) == set(stored)
    for name, array in stored.items():
        assert written[name].shape == array.shape
        np.testing.assert_allclose(written[name].values(), array.astype(np.float32), atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "change, config, message",
    [
        ({STORED.format(4, "gate"): None}, {}, "needs 9 matrices and has 8: number 4 is missing"),
        ({STORED.format(9, "gate"): (36, 64)}, {}, "needs 9 matrices and has 10: number 9 is one too many"),
        ({STORED.format(5, "down"): (64, 35)}, {}, r"matrix 5 of '.*down_proj.weight' is F32 \(64, 35\), but others"),
        ({STORED.format(5, "down"): (64,)}, {}, r"matrix 5 of '.*down_proj.weight' is F32 \(64,\), but others"),
        ({}, {"num_experts": 10}, "needs 10 matrices and has 9: number 9 is missing"),
        ({}, {"num_experts": 8}, r"needs 8 matrices and has 9: number 8 is one too many"),
        ({}, {"num_experts_per_tok": 10}, "a token takes 10 experts, but there are 9"),
        ({}, {"num_experts": 0}, "num_experts is 0; it must be a whole number from 1 to 4096"),
        ({}, {"moe_intermediate_size": 37}, r"has shape \(9, 36, 64\), but the model needs \(9, 37, 64\)"),
        ({}, {"mlp_only_layers": ["x"]}, "mlp_only_layers is .*; it must be a list of layers"),
    ],
)
def test_experts_that_are_not_there(tmp_path, change, config, message):
    folder = tmp_path / "m"
    shutil.copytree(FOLDER, folder, copy_function=shutil.copyfile)
    tensors = load_file(FOLDER / "model.safetensors")
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape:
            tensors[name] = np.zeros(shape, np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((FOLDER / "config.json").read_text()) | config))
    with pytest.raises(ModelFileError, match=message) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value) and re.match(str(tmp_path), str(error.value))


@pytest.mark.parametrize(
    "family, fields, dropped, says",
    [
        ("qwen3moe", {"num_experts_per_tok": 10}, "", "config.json: a token takes 10 experts, but there are 9"),
        ("qwen3moe", {"num_experts_per_tok": 0}, "", "num_experts_per_tok is 0; it must be a whole number from 1"),
        ("qwen3moe", {"num_experts": 10}, "", "needs 10 matrices and has 9: number 9 is missing"),
        ("qwen3moe", {"num_experts": 8}, "", "needs 8 matrices and has 9: number 8 is one too many"),
        ("qwen3moe", {"num_experts": 10**9}, "", "num_experts is 1000000000; it must be a whole number from 1"),
        ("qwen3moe", {}, ".experts.3.up_proj.", "needs 9 matrices and has 8: number 3 is missing"),
        ("mixtral", {"intermediate_size": 44}, "", "has shape (4, 76, 64), but the model needs (4, 44, 64)"),
        ("gptoss", {"num_local_experts": 6}, "", "has shape (5, 36, 64), but the model needs"),
        ("deepseek_v3", {"n_group": 3}, "", "8 experts cannot be 3 equal groups with 2 chosen ones"),
        ("deepseek_v3", {"topk_group": 99}, "", "8 experts cannot be 4 equal groups with 99 chosen ones"),
        ("deepseek_v3", {"n_shared_experts": 3}, "", "has shape (16, 64), but the model needs (48, 64)"),
    ],
)
def test_counts_that_lie(family, fields, dropped, says, tmp_path):
    """Of experts, of those that a token takes, of groups and sizes: one line."""
    config = json.loads((GOLDEN / family / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    tensors = load_file(GOLDEN / family / "model.safetensors")
    kept = {name: array for name, array in tensors.items() if not dropped or dropped not in name}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=re.escape(says)) as error:
        open_checkpoint(tmp_path)
    assert "\n" not in str(error.value)

"""gpt-oss in files: gate and up by turns, experts as floats with inputs as rows, and what is wrong with them."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckdist.errors import ModelFileError
from ckdist.models.families import gptoss
from ckdist.models.registry import spec_from_config
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_rows, read_tensor
from tests.support.paths import GOLDEN

FOLDER = GOLDEN / "gptoss"
EXPERTS = "model.layers.{}.mlp.experts."
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def test_floats_are_read_as_transformers_means_them():
    checkpoint, stored = open_checkpoint(FOLDER), load_file(FOLDER / "model.safetensors")
    for layer in range(2):
        path = EXPERTS.format(layer)
        gate_up, bias, down = (stored[path + name] for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj"))
        for lane, name in enumerate(("gate", "up")):
            weight, of_weight = (checkpoint.tensors[f"{path}{name}_proj.{kind}"] for kind in ("weight", "bias"))
            np.testing.assert_array_equal(read_tensor(weight), gate_up[:, :, lane::2].swapaxes(1, 2))
            np.testing.assert_array_equal(read_rows(weight, 5, 9, 3), gate_up[3, :, lane::2].T[5:9])
            np.testing.assert_array_equal(read_tensor(of_weight), bias[:, lane::2].reshape(-1))
        np.testing.assert_array_equal(read_tensor(checkpoint.tensors[path + "down_proj.weight"]), down.swapaxes(1, 2))


def test_a_config_without_them_has_the_published_numbers():
    spec = spec_from_config(
        {"model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 8, "vocab_size": 300,
         "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}, "config"
    )  # fmt: skip
    assert [layer.attention.window for layer in spec.layers] == [128, 0, 128, 0]
    assert all(
        layer.attention.sinks and layer.attention.o_bias and layer.ffn.routing.used == 4 for layer in spec.layers
    )
    rope = spec.ropes["global"]
    assert rope.theta == gptoss.THETA and rope.magnitude == pytest.approx(0.1 * np.log(32) + 1)


@pytest.mark.parametrize(
    "change, config, message",
    [
        ({GATE_UP: (5, 72, 64)}, {}, r"has shape \(5, 72, 64\), but the model needs .*: \(5, 64, 72\)"),
        ({GATE_UP: (5, 64)}, {}, r"has shape \(5, 64\), but the model needs .*: \(5, 64, 72\)"),
        ({GATE_UP: None}, {}, r"'.*gate_proj.weight' of shape \(5, 36, 64\) is missing"),
        ({GATE_UP + "_bias": (5, 70)}, {}, r"has shape \(350,\), but the model needs 360 elements"),
        ({GATE_UP + "_bias": None}, {}, r"'.*gate_proj.bias' of shape \(180,\) is missing"),
        ({"model.layers.0.self_attn.sinks": (5,)}, {}, r"has shape \(5,\), but the model needs \(6,\)"),
        ({"model.layers.0.self_attn.sinks": None}, {}, r"'.*self_attn.sinks' of shape \(6,\) is missing"),
        ({}, {"num_local_experts": 6}, r"but the model needs .*: \(6, 36, 64\)"),
        ({}, {"num_experts_per_tok": 6}, "a token takes 6 experts, but there are 5"),
        ({}, {"swiglu_limit": 8.0}, "swiglu_limit is 8.0; it must be 7"),
        ({}, {"swiglu_alpha": "x"}, "swiglu_alpha is 'x'; it must be a number"),
        ({}, {"layer_types": ["sliding_attention"]}, "layer_types is .*; it must be a list of 2"),
    ],
)
def test_what_does_not_fit(tmp_path, change, config, message):
    folder = tmp_path / "m"
    shutil.copytree(FOLDER, folder, copy_function=shutil.copyfile)
    tensors = load_file(FOLDER / "model.safetensors")
    for name, shape in change.items():
        tensors.pop(name)
        if shape:
            tensors[name] = np.zeros(shape, np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((FOLDER / "config.json").read_text()) | config))
    with pytest.raises(ModelFileError, match=message) as error:
        open_checkpoint(folder)
    assert "\n" not in str(error.value) and re.match(str(tmp_path), str(error.value))

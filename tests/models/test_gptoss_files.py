"""gpt-oss in files: gate and up by turns, experts in MXFP4 or as floats with inputs as rows, and what is wrong."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import ModelFileError
from ckdist.models.families import gptoss
from ckdist.models.registry import spec_from_config
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_rows, read_tensor
from ckdist.weights.gguf_export import export_gguf
from tests.support.byte_vocabulary import byte_vocabulary
from tests.support.llama_cpp_peer import load_peer
from tests.support.paths import GOLDEN
from tests.support.published import write_stacks
from tests.support.situations import driven
from tests.support.thread_ranks import run_threads

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
        ({}, {"swiglu_alpha": "x"}, "swiglu_alpha is 'x'; it must be 1.702"),
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


IDS = np.arange(40) * 7 % 290 + 4


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with experts in MXFP4, and one with their values as floats."""
    folder = tmp_path_factory.mktemp("gptoss")
    write_stacks(folder)
    return folder


def logits_of(path, world=None, **more) -> np.ndarray:
    """Of a prompt and of a token after it: (41, vocab); None on ranks other than 0."""
    config = EngineConfig(model=str(path), cache_type_k="f32", cache_type_v="f32", threads=1, ubatch_size=48, **more)
    world = world or SingleWorld()
    model = load_model(config, world)

    def both(executable):
        sequence = SingleSequence(executable)
        return np.concatenate([sequence.feed(IDS).copy(), sequence.feed([3])])

    logits = driven(world, model.executable, both)
    model.executable.close()
    return logits


def test_blocks_mean_their_values(published):
    packed, plain = (open_checkpoint(published / name) for name in ("quantised", "plain"))
    for name, source in packed.tensors.items():
        np.testing.assert_array_equal(read_tensor(source), read_tensor(plain.tensors[name]), err_msg=name)
    logits, expected = logits_of(published / "quantised"), logits_of(published / "plain")
    assert np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()  # activations of 8 bits
    np.testing.assert_array_equal(logits, logits_of(published / "quantised", repack="off"))
    for name in ("quantised", "plain"):
        quantised = logits_of(published / name, quantize="q8_0")
        assert np.sqrt(np.mean((quantised - expected) ** 2)) < 0.05 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize(
    "hosts, experts", [("aa", "tensor"), ("aaa", "tensor"), ("aaaaa", "tensor"), ("ab", "tensor"), ("abb", "expert")]
)
def test_blocks_on_several_ranks(published, hosts, experts):
    """96 columns of down are three blocks, which five ranks cannot share.

    In tiles, a sum in another order may round an activation to the neighbouring bfloat16: in some rows, by 2^-8 of it.
    """
    transport = "auto" if "b" not in hosts else "tcp"
    for tiles, most in (("off", 1e-4), ("auto", 2e-3)):
        one = logits_of(published / "quantised", prompt_tiles=tiles)
        run = lambda world, tiles=tiles: logits_of(
            published / "quantised", world, experts=experts, transport=transport, prompt_tiles=tiles
        )
        rows = np.abs(run_threads(list(hosts), run)[0] - one).max(1) / np.abs(one).max()
        assert rows.max() < most and np.median(rows) < 1e-4


def test_blocks_stay_as_they_are_in_gguf(published, tmp_path, monkeypatch):
    monkeypatch.setattr("ckdist.weights.gguf_export.tokenizer_metadata", byte_vocabulary)
    monkeypatch.setattr("ckdist.weights.gguf_export.CHUNK_FLOATS", 640)  # ten rows of gate and up, six of down
    path = tmp_path / "m.gguf"
    export_gguf(str(published / "quantised"), str(path), "f32")
    before, after = open_checkpoint(published / "quantised"), open_checkpoint(path)
    for name, source in before.tensors.items():
        np.testing.assert_array_equal(read_tensor(after.tensors[name]), read_tensor(source), err_msg=name)
    np.testing.assert_array_equal(logits_of(path), logits_of(published / "quantised"))
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "gpt-oss"
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["blk.0.ffn_up_exps.bias"].shape.tolist() == [96, 3]
    for name, weight in (("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")):
        tensor = tensors[f"blk.1.{name}.weight"]
        assert tensor.tensor_type == gguf.GGMLQuantizationType.MXFP4
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(values, read_tensor(before.tensors[EXPERTS.format(1) + weight + ".weight"]))
    peer = load_peer(path, monkeypatch, n_ctx=512, logits_all=True)
    peer.eval(IDS.tolist())
    expected = logits_of(path)[: len(IDS)]
    np.testing.assert_allclose(peer.scores[: len(IDS)], expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"_scales": None}, "has no '.*gate_up_proj_scales', without which its codes mean nothing"),
        ({"_scales": (3, 192, 3)}, r"has shape \(3, 192, 3\), but .* needs \(3, 192, 2\)"),
        ({"_blocks": (3, 192, 2, 8)}, r"is U8 \(3, 192, 2, 8\); it must be U8 \(…, out, in / 32, 16\)"),
        ({"_blocks": (3, 190, 2, 16), "_scales": (3, 190, 2)}, r"\(3, 190, 64\), but .* needs .*: \(3, 192, 64\)"),
        ({"_blocks": (2, 192, 2, 16), "_scales": (2, 192, 2)}, r"\(2, 192, 64\), but .* needs .*: \(3, 192, 64\)"),
        ({"_scales": "255"}, "exponent of 255: it is damaged"),
    ],
)
def test_damaged_blocks(published, tmp_path, monkeypatch, change, message):
    monkeypatch.setattr("ckdist.weights.gguf_export.tokenizer_metadata", lambda *_: {})
    tensors = load_file(published / "quantised" / "model.safetensors")
    for part, shape in change.items():
        old = tensors.pop(GATE_UP + part)
        if shape == "255":
            tensors[GATE_UP + part] = np.where(np.arange(2) == 1, np.uint8(255), old)
        elif shape:
            tensors[GATE_UP + part] = np.full(shape, 121, np.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copyfile(published / "quantised" / "config.json", tmp_path / "config.json")
    with pytest.raises(ModelFileError, match=message) as error:
        export_gguf(str(tmp_path), str(tmp_path / "m.gguf"), "f32")
    assert "\n" not in str(error.value)
    with pytest.raises(ModelFileError):
        logits_of(tmp_path)

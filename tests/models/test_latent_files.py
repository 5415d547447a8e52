"""Older GGUF files of latent attention: keys and values of each head in one tensor, in every type that can be made."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import ModelFileError
from ckdist.models.registry import family
from ckdist.weights import dtypes
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import dequantize, read_tensor
from ckdist.weights.gguf_export import TYPES, stored
from ckdist.weights.gguf_writer import GgufTensorToWrite, write_gguf
from tests.support.paths import GOLDEN

FOLDER = GOLDEN / "deepseek_v3"


def old_file(path, kind: str, columns: int = 0):
    """The golden model as older converters wrote it; `columns` more of what makes keys and values."""
    checkpoint, arrays = open_checkpoint(FOLDER), load_file(FOLDER / "model.safetensors")
    mixer = checkpoint.spec.layers[0].mixer
    form = family("deepseek_v2").gguf_form(replace_eps(checkpoint.spec), "here")
    metadata = {name: value for name, value in form.metadata.items() if not name.endswith("_mla")}
    metadata |= {"deepseek2.attention.key_length": mixer.head_dim, "deepseek2.attention.value_length": mixer.v_dim}
    names, tensors = family("deepseek_v2").gguf_names, []
    for weight, source in checkpoint.tensors.items():
        if weight.endswith("v_b_proj.weight"):
            continue
        values, of = read_tensor(source), dtypes.F32
        if weight.endswith("k_b_proj.weight"):
            weight = weight.replace("k_b_proj", "kv_b_proj")
            values, of = arrays[weight][:, : arrays[weight].shape[1] + columns], TYPES[kind]
            written = f"blk.{weight.split('.')[2]}.attn_kv_b.weight"
        else:
            ((written, _),) = names.stored([weight]).items()
            if written.endswith("shexp.weight") and values.ndim == 3:
                values = values[0]
        data = stored(values, of)
        tensors.append(GgufTensorToWrite(written, of, values.shape, lambda data=data: data))
    write_gguf(path, metadata, tensors)
    return path


def replace_eps(spec):
    """The model with the norms' eps that GGUF can say."""
    layers = [dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, norm_eps=0.0)) for layer in spec.layers]
    return dataclasses.replace(spec, layers=tuple(layers))


def logits(path, ids, threads=1) -> np.ndarray:
    config = EngineConfig(model=str(path), cache_type_k="f32", cache_type_v="f32", threads=threads, ctx_size=128)
    model = load_model(config, SingleWorld())
    found = SingleSequence(model.executable).feed(ids)
    model.close()
    return found


@pytest.mark.parametrize("kind, tolerance", [("f32", 1e-5), ("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 2e-2)])
def test_one_tensor_of_keys_and_values(kind, tolerance, tmp_path):
    path, ids = old_file(tmp_path / "old.gguf", kind), np.load(FOLDER / "ids.npy")[:24]
    checkpoint = open_checkpoint(path)
    layer = "model.layers.1.self_attn"
    exact = load_file(FOLDER / "model.safetensors")[f"{layer}.kv_b_proj.weight"]
    rounded = dequantize(stored(exact, TYPES[kind]), TYPES[kind].number, exact.shape[1]).reshape(5, 56, 32)
    keys, values = (read_tensor(checkpoint.tensors[f"{layer}.{part}_b_proj.weight"]) for part in "kv")
    assert np.array_equal(keys.reshape(5, 32, 32), rounded[:, :32].swapaxes(1, 2))
    assert np.array_equal(values.reshape(5, 24, 32), rounded[:, 32:])
    expected = logits(FOLDER, ids)
    # The root mean square: in Q8_0 activations are codes of 8 bits, and an expert's near tie may fall otherwise.
    assert np.sqrt(np.mean((logits(path, ids) - expected) ** 2)) < tolerance * np.abs(expected).max()


def test_a_tensor_of_another_size(tmp_path):
    with pytest.raises(ModelFileError, match=r"attn_kv_b.* has shape \(280, 31\), but the model needs \(280, 32\)"):
        open_checkpoint(old_file(tmp_path / "old.gguf", "f32", columns=-1))

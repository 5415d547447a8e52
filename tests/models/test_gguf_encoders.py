"""Encoders as GGUF files: golden models under the names that the gguf package maps them to, written by it."""

import json
import shutil

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from ckdist.cli.export import export_gguf
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.sampler import Sampler
from ckdist.errors import ModelFileError
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.stored_pooling import stored_pooling
from tests.support.paths import GOLDEN

ARCHITECTURES = {"bert": "bert", "roberta": "bert", "nomic_bert": "nomic-bert"}
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}


OWN_NAMES = {
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "self_attn.o_proj": "attn.out_proj",
    "embeddings.LayerNorm": "emb_ln",
}


def _own_name(name: str) -> str:
    """What Nomic's own code calls a tensor of transformers."""
    for one, other in OWN_NAMES.items():
        name = name.replace(one, other)
    return f"encoder.{name}" if name.startswith("layers.") else name


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """The golden tensors by the names that conversions know; RoBERTa's positions without those of the padding."""
    stored = load_file(GOLDEN / "encoders" / name / "model.safetensors")
    if name == "roberta":
        stored["embeddings.position_embeddings.weight"] = stored["embeddings.position_embeddings.weight"][2:]
    if name == "nomic_bert":  # by the names of the model's own code
        stored = {_own_name(key): values for key, values in stored.items()}
        for path in {key.partition("self_attn")[0] for key in stored if "self_attn" in key}:
            parts = [stored.pop(f"{path}self_attn.{part}_proj.weight") for part in "qkv"]
            stored[f"{path}attn.Wqkv.weight"] = np.concatenate(parts)
    return stored


def write(path, name: str, pooling: int = 2, half: bool = False, **more) -> None:
    """A GGUF file of a golden encoder; `half`: its matrices are F16."""
    config = json.loads((GOLDEN / "encoders" / name / "config.json").read_text())
    arch, layers = ARCHITECTURES[name], config["num_hidden_layers"]
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names, writer = gguf.get_tensor_name_map(number, layers), gguf.GGUFWriter(str(path), arch)
    for key, field in SIZES.items():
        writer.add_uint32(f"{arch}.{key}", config[field])
    cut = 2 if name == "roberta" else 0
    writer.add_context_length(config["max_position_embeddings"] - cut)
    writer.add_layer_norm_eps(config.get("layer_norm_eps", 1e-12))
    writer.add_causal_attention(more.get("causal", False))
    writer.add_uint32(f"{arch}.pooling_type", pooling)
    if name == "nomic_bert":
        writer.add_rope_freq_base(config.get("rope_theta", config.get("rotary_emb_base", 1000.0)))
    for key, values in tensors_of(name).items():
        stored = names.get_name(key, (".weight", ".bias"))
        if stored is None:
            assert key.startswith("pooler."), key  # which conversions leave out
            continue
        writer.add_tensor(stored, values.astype(np.float16) if half and values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hidden(path) -> np.ndarray:
    """The first token's hidden state of the golden text."""
    fields = {"cache_type_k": "f32", "cache_type_v": "f32", "threads": 1}
    loaded = load_model(EngineConfig(model=str(path), **fields), SingleWorld(), embeddings=True)
    try:
        engine = Engine(loaded.executable, Sampler(loaded.spec.vocab_size))
        engine.embed(0, np.load(GOLDEN / "encoders" / path.stem / "ids.npy"), "cls")
        (output,) = [output for _ in range(9) if engine.has_work for output in engine.step()]
        return output.embedding
    finally:
        loaded.close()


@pytest.mark.parametrize("half", [False, True], ids=["F32", "F16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_golden_hidden_states(tmp_path, name, half):
    path = tmp_path / f"{name}.gguf"
    write(path, name, half=half)
    stored = open_checkpoint(path)
    assert not stored.spec.generates and stored_pooling(stored) == "cls"
    expected = np.load(GOLDEN / "encoders" / name / "hidden.npy")
    tolerance = (1e-2 if half else 2e-5) * np.abs(expected).max()
    assert np.abs(hidden(path) - expected[0]).max() < tolerance


@pytest.mark.parametrize(
    "changed, words", [({"pooling": 4}, "pooling_type is 4"), ({"causal": True}, "causal is True")]
)
def test_what_is_no_encoder_of_texts(tmp_path, changed, words):
    write(tmp_path / "bert.gguf", "bert", **changed)
    with pytest.raises(ModelFileError, match=words):
        open_checkpoint(tmp_path / "bert.gguf")


def test_embedding_gemma_with_the_dense_layers_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("ckdist.weights.gguf_export.tokenizer_metadata", lambda *_: {})  # the golden models have none
    folder, path = GOLDEN / "encoders" / "embedding_gemma", tmp_path / "embedding_gemma.gguf"
    export_gguf(str(folder), str(path), "f32")
    stored, names = open_checkpoint(path), gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA_EMBEDDING, 3)
    known = {*names.mapping.values(), *((None, f"dense_{i}") for i in (2, 3))}
    assert {tensor.name.removesuffix(".weight") for tensor in gguf.GGUFReader(path).tensors} <= {n for _, n in known}
    assert (stored.spec.projections, stored_pooling(stored)) == ((72, 48), "mean")
    expected = np.load(folder / "hidden.npy")
    assert np.abs(hidden(path) - expected[0]).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    "about, words",
    [
        ({"activation_function": "torch.nn.modules.activation.Tanh"}, "dense layers with a function are not supported"),
        ({"bias": True}, "dense layers with a bias are not supported"),
        ({"out_features": 7}, r"has shape \(72, 48\), but the model needs \(7, 48\)"),
    ],
)
def test_dense_layers_that_cannot_be_read(tmp_path, about, words):
    folder = shutil.copytree(GOLDEN / "encoders" / "embedding_gemma", tmp_path / "model")
    config = folder / "2_Dense" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | about))
    with pytest.raises(ModelFileError, match=words):
        open_checkpoint(folder)

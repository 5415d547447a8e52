"""T5 as GGUF files: golden models under the names that the gguf package maps them to, written by it."""

import json
import shutil

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from tests.support.paths import GOLDEN

FOLDER = GOLDEN / "encoder_decoders"
SIZES = {
    "block_count": "num_layers",
    "decoder_block_count": "num_decoder_layers",
    "embedding_length": "d_model",
    "feed_forward_length": "d_ff",
    "attention.head_count": "num_heads",
    "attention.key_length": "d_kv",
    "attention.value_length": "d_kv",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    "decoder_start_token_id": "decoder_start_token_id",
}


def write(path, name: str) -> None:
    """A GGUF file of a golden model."""
    config = json.loads((FOLDER / name / "config.json").read_text())
    names, writer = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, 3), gguf.GGUFWriter(str(path), "t5")
    for key, field in SIZES.items():
        writer.add_uint32(f"t5.{key}", config[field])
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, values in load_file(FOLDER / name / "model.safetensors").items():
        writer.add_tensor(names.get_name(key, (".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def text_and_vector(model) -> tuple[list[int], np.ndarray]:
    """The greedy text of the golden source, and the mean of its hidden states."""
    fields = {"cache_type_k": "f32", "cache_type_v": "f32", "threads": 1}
    loaded = load_model(EngineConfig(model=str(model), **fields), SingleWorld())
    try:
        engine = Engine(loaded.executable, Sampler(loaded.spec.vocab_size), start_tokens=loaded.spec.start_tokens)
        source, tokens, vector = np.load(FOLDER / "t5" / "sources.npz")["0"], [], np.empty(0)
        engine.add(0, source, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
        engine.embed(1, source, "mean")
        while engine.has_work:
            for output in engine.step():
                tokens, vector = tokens + output.tokens, vector if output.embedding is None else output.embedding
        return tokens, vector
    finally:
        loaded.close()


@pytest.mark.parametrize("name", ["t5", "t5_gated"])
def test_a_file_is_its_folder(tmp_path, name):
    """GGUF has one distance from which on all are alike, 128."""
    write(tmp_path / f"{name}.gguf", name)
    folder = tmp_path / name
    shutil.copytree(FOLDER / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "relative_attention_max_distance": 128}))
    (tokens, vector), (wanted, expected) = text_and_vector(tmp_path / f"{name}.gguf"), text_and_vector(folder)
    assert tokens == wanted and len(tokens) == 24
    np.testing.assert_array_equal(vector, expected)

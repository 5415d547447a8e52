"""Export as GGUF: the gguf package and llama.cpp read it, and both continue a text as ckdist does."""

import pathlib

import numpy as np
import pytest

from ckdist import LLM, SamplingParams
from ckdist.cli.export import export_gguf
from ckdist.engine.launch import BUNDLED
from ckdist.errors import ArchitectureError, ConfigError, EngineError, ModelFileError
from ckdist.tokens.folder import load_tokenizer
from ckdist.tokens.source import tokenizer_of
from ckdist.tokens.to_gguf import PROBES, tokenizer_metadata
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.loader import read_tensor

GOLDEN = pathlib.Path(__file__).parent / "golden"
PROMPTS = ["def main(", "import os\n\nclass Foo", "What does json.dumps do?"]


@pytest.fixture(scope="module", params=["f16", "q8_0", "q4_k"])
def exported(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / f"{request.param}.gguf"
    assert export_gguf(str(BUNDLED), str(path), request.param) == path.stat().st_size
    return request.param, path


def test_what_is_written_is_the_model(exported):
    kind, path = exported
    before, after = open_checkpoint(BUNDLED), open_checkpoint(path)
    assert after.spec.max_position == before.spec.max_position and after.spec.tie_embeddings and after.spec.num_kv_heads == before.spec.num_kv_heads
    np.testing.assert_allclose(after.spec.rope.inverse_frequencies, before.spec.rope.inverse_frequencies, rtol=1e-6)
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.2.mlp.down_proj.weight", "model.norm.weight"):
        a, b = read_tensor(before.tensors[name]), read_tensor(after.tensors[name])
        assert np.linalg.norm(a - b) <= {"f16": 4e-4, "q8_0": 6e-3, "q4_k": 0.09}[kind] * np.linalg.norm(a), name
    ours, theirs = load_tokenizer(BUNDLED), tokenizer_of(path)
    assert all(ours.encode(text) == theirs.encode(text) for text in [*PROBES, *PROMPTS])
    assert ours.eos_token_ids == theirs.eos_token_ids and theirs.chat_template.sources == ours.chat_template.sources
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    assert len(reader.tensors) == len(before.tensors) - 1 and reader.fields["general.architecture"].contents() == "llama"


def test_llama_cpp_continues_with_the_same_text(exported):
    llama_cpp = pytest.importorskip("llama_cpp")
    _, path = exported
    peer, own = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, verbose=False), LLM(str(path), threads=1)
    texts = [result.text for result in own.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0))]
    assert [peer(prompt, max_tokens=24, temperature=0)["choices"][0]["text"] for prompt in PROMPTS] == texts
    assert any(texts)


@pytest.mark.parametrize("family", ["llama2", "llama3", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_every_family_comes_back_as_it_was(family, tmp_path, monkeypatch):
    monkeypatch.setattr("ckdist.cli.export.tokenizer_metadata", lambda *_: {})  # the golden models have none
    before = open_checkpoint(GOLDEN / family)
    try:
        export_gguf(str(GOLDEN / family), str(tmp_path / "m.gguf"), "f32")
    except ArchitectureError as error:
        assert "has no GGUF form" in str(error)
        return
    after = open_checkpoint(tmp_path / "m.gguf")
    np.testing.assert_allclose(after.spec.rope.inverse_frequencies, before.spec.rope.inverse_frequencies, rtol=1e-5)
    if before.spec.rope_local:
        np.testing.assert_allclose(after.spec.rope_local.inverse_frequencies, before.spec.rope_local.inverse_frequencies, rtol=1e-6)
    for name, source in before.tensors.items():
        np.testing.assert_array_equal(read_tensor(after.tensors[name]), read_tensor(source), err_msg=name)
    fields = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "attention_soft_cap", "logit_soft_cap", "sliding_window", "sliding_layers", "qkv_bias", "qk_norm", "post_norms", "tie_embeddings")
    assert [getattr(after.spec, f) for f in fields] == [getattr(before.spec, f) for f in fields]


def test_mistakes(tmp_path):
    with pytest.raises(ConfigError, match="is a folder: name the file"):
        export_gguf(str(BUNDLED), str(tmp_path), "f16")
    with pytest.raises(EngineError, match="could not be written: No such file"):
        export_gguf(str(BUNDLED), str(tmp_path / "none" / "m.gguf"), "f16")
    with pytest.raises(ModelFileError, match="the tokenizer has 4096 tokens, and the model 7"):
        tokenizer_metadata(BUNDLED, 7)

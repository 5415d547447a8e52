"""Decoders that rank documents, as Qwen3-Reranker, and Qwen3-Embedding's folder."""

import json
import shutil

import gguf
import numpy as np
import pytest

from ckdist import LLM
from ckdist.cli.export import export_gguf
from ckdist.engine.load_model import BUNDLED
from ckdist.errors import ModelFileError, RequestError
from ckdist.tokens.tokenizer_source import tokenizer_of
from ckdist.tokens.tokenizer_to_gguf import tokenizer_metadata
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.stored_pooling import stored_pooling
from ckdist.weights.stored_ranking import TEMPLATE, stored_ranking
from tests.support.paths import GOLDEN


def with_module(folder, name: str, config: dict) -> None:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(config))


def test_a_score_is_the_logit_of_yes_less_that_of_no(tmp_path):
    """By the module of sentence-transformers that names both tokens."""
    folder = shutil.copytree(BUNDLED, tmp_path / "model")
    with_module(folder, "1_LogitScore", {"true_token_id": 300, "false_token_id": 17})
    llm = LLM(str(folder), threads=1)
    assert llm.pooling == "rank"
    prompts = [llm.tokenizer.encode(text) for text in ("def main():", "import os\n" * 30)]
    with pytest.raises(RequestError, match="the model does not rank, so pooling rank is wrong"):
        llm.embed(prompts)
    checkpoint = open_checkpoint(folder)
    llm.engine.ranking = stored_ranking(checkpoint, llm.tokenizer)
    scores = llm.embed(prompts, normalise=False)  # (prompts, 1)
    expected = [logits[-1, 300] - logits[-1, 17] for logits in map(llm.logits, prompts)]
    np.testing.assert_allclose(scores[:, 0], expected, atol=1e-3 * np.abs(expected).max())
    assert llm.engine.ranking.template == TEMPLATE


def test_a_gguf_file_of_a_reranker(tmp_path, monkeypatch):
    """As llama.cpp's converter writes it: the kind of pooling, the labels, and a template of its own."""
    path, template = tmp_path / "m.gguf", "{query} / {document}"
    more = {"llama.pooling_type": 4, "tokenizer.chat_template.rerank": template}
    for labels, said in ((["yes", "no"], "'yes' has 2 tokens; a reranker needs one"), (["a", "b"], "it must be")):
        given = {**more, "llama.classifier.output_labels": labels}
        monkeypatch.setattr(
            "ckdist.weights.gguf_export.tokenizer_metadata", lambda *of, g=given: tokenizer_metadata(*of) | g
        )
        export_gguf(str(BUNDLED), str(path), "f16")
        checkpoint, tokenizer = open_checkpoint(path), tokenizer_of(path)
        assert stored_pooling(checkpoint) == "rank" and tokenizer.templates["rerank"] == template
        with pytest.raises(ModelFileError, match=said):
            stored_ranking(checkpoint, tokenizer)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_gguf_file_has_an_output_layer_of_its_own(tmp_path, rows):
    """Its rows decide, not those of the output projection."""
    reader = gguf.GGUFReader(GOLDEN / "gguf/BF16.gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    hidden = open_checkpoint(GOLDEN / "gguf/BF16.gguf").spec.hidden_size
    own = np.random.default_rng(0).standard_normal((rows, hidden)).astype(np.float32)
    writer.add_tensor("cls.output.weight", own)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    tokenizer = tokenizer_of(BUNDLED)
    if rows == 2:
        direction = stored_ranking(open_checkpoint(tmp_path / "m.gguf"), tokenizer).direction
        np.testing.assert_array_equal(direction, own[0] - own[1])
    else:
        with pytest.raises(ModelFileError, match=r"has shape \(3, \d+\), but the model needs \(2, "):
            stored_ranking(open_checkpoint(tmp_path / "m.gguf"), tokenizer)


def test_an_embedding_model_of_qwen_3_pools_the_last_token(tmp_path):
    folder = shutil.copytree(GOLDEN / "qwen3", tmp_path / "model")
    kinds = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    modes = {f"pooling_mode_{kind}": kind == "lasttoken" for kind in kinds}
    with_module(folder, "1_Pooling", {"word_embedding_dimension": 64, **modes, "include_prompt": True})
    assert stored_pooling(open_checkpoint(folder)) == "last"

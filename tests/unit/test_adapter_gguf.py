"""LoRA adapters in GGUF: the matrices of the same adapter in PEFT's format, and what is refused."""

import re

import numpy as np
import pytest

from ckdist.errors import ModelFileError
from ckdist.weights.adapter_file import MODULES, load_adapter
from ckdist.weights.checkpoint import open_checkpoint
from tests.support.adapters import as_gguf, random_adapter
from tests.support.paths import GOLDEN


@pytest.mark.parametrize("model, adapter", [("llama3", None), ("phi3", "phi3-patterns"), ("qwen3moe", "qwen3moe")])
def test_matrices_are_those_of_peft_s_format(tmp_path, model, adapter):
    """Also with interleaved rows of heads (llama3), in one tensor of several weights (phi3), and of experts."""
    folder = GOLDEN / "lora" / str(adapter)
    if adapter is None:
        folder = tmp_path / "peft"
        random_adapter(folder, GOLDEN / model, MODULES)
    as_gguf(tmp_path / "a.gguf", folder, GOLDEN / model)
    spec = open_checkpoint(GOLDEN / model).spec
    expected, found = (load_adapter(path, spec).matrices for path in (folder, tmp_path / "a.gguf"))
    assert found.keys() == expected.keys()
    for name, matrix in expected.items():
        np.testing.assert_allclose(found[name], matrix, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"general.architecture": "qwen3"}, "is for architecture 'qwen3', and the model's is 'llama'"),
        ({"general.type": "model"}, "has general.type 'model' and adapter.type 'lora'; an adapter has adapter and"),
        ({"adapter.lora.alpha": 16}, "adapter.lora.alpha is 16, and must be a finite number"),
        ({"adapter.alora.invocation_tokens": [3]}, "adapter.alora.invocation_tokens is not supported"),
    ],
)
def test_other_metadata_is_refused_by_name(tmp_path, metadata, message):
    random_adapter(tmp_path / "peft", GOLDEN / "llama3", ("q_proj",))
    as_gguf(tmp_path / "a.gguf", tmp_path / "peft", GOLDEN / "llama3", **metadata)
    with pytest.raises(ModelFileError, match=re.escape(message)):
        load_adapter(tmp_path / "a.gguf", open_checkpoint(GOLDEN / "llama3").spec)


@pytest.mark.parametrize(
    "old, new, message",
    [
        (b"attn_q.weight.lora_b", b"attn_q.weight.lora_c", "has blk.0.attn_q.weight.lora_a, but not "),
        (b"blk.0.attn_q.", b"blk.0.attn_x.", "'blk.0.attn_x.weight.lora_a' is not a matrix of LoRA"),
        (b"blk.0.attn_q.", b"blk.0.attn_k.", "rows, and the model needs 48: it was trained on another model"),
        (b"GGUF", b"FUGG", "a.gguf"),
    ],
)
def test_other_tensors_are_refused_by_name(tmp_path, old, new, message):
    random_adapter(tmp_path / "peft", GOLDEN / "llama3", ("q_proj",))
    as_gguf(tmp_path / "a.gguf", tmp_path / "peft", GOLDEN / "llama3")
    (tmp_path / "a.gguf").write_bytes((tmp_path / "a.gguf").read_bytes().replace(old, new))
    with pytest.raises(ModelFileError, match=re.escape(message)):
        load_adapter(tmp_path / "a.gguf", open_checkpoint(GOLDEN / "llama3").spec)

"""Folders of safetensors that can be read in two ways, or whose tensors have other names."""

import contextlib
import json
import shutil

import numpy as np
import pytest

from ckdist.errors import ConfigError, ModelFileError
from ckdist.models.spec import Attention
from ckdist.train.trainer import train
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.gguf_export import export_gguf
from tests.support.paths import GOLDEN
from tests.support.tiny_training import config

safetensors = pytest.importorskip("safetensors.numpy")
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/model.safetensors"))
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def stored(family):
    return safetensors.load_file(GOLDEN / family / SINGLE)


def folder(path, family, tensors=None, **fields):
    """A golden model with other tensors and other fields in config.json."""
    path.mkdir(exist_ok=True)
    original = json.loads((GOLDEN / family / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(original | fields))
    if tensors is not None:
        safetensors.save_file(tensors, path / SINGLE)
    return path


def shards(path, tensors, stem="model"):
    """Two files, without an index."""
    names = sorted(tensors)
    for name, part in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        safetensors.save_file({key: tensors[key] for key in part}, path / name.replace("model", stem))


def assert_same(checkpoint, family):
    expected = open_checkpoint(GOLDEN / family).tensors
    assert set(checkpoint.tensors) == set(expected)
    for name, source in expected.items():
        np.testing.assert_array_equal(read_tensor(checkpoint.tensors[name]), read_tensor(source), err_msg=name)


@pytest.mark.parametrize(
    "family, prefix", [(family, ("", "language_model.")[i % 2]) for i, family in enumerate(FAMILIES)]
)
def test_names_without_model_are_read(tmp_path, family, prefix):
    """As AutoModel saves a text model, and a multimodal one."""
    tensors = {
        name
        if name.startswith("lm_head")
        else prefix + name.removeprefix("model.").removeprefix("language_model."): array
        for name, array in stored(family).items()
        if not any(part in name for part in (".visual.", "vision_"))
        and not name.startswith(("multi_modal_projector.", "patch_merge_mlp.", "vit_large_projector."))
    }
    checkpoint = open_checkpoint(folder(tmp_path / "model", family, tensors))
    assert_same(checkpoint, family)
    notes = [note for note in checkpoint.notes if "lack 'model.'" in note]
    assert len(notes) == any(name.startswith("model.") for name in stored(family))
    assert all("they are read with it" in note for note in notes)


def test_export_and_training_say_how_a_folder_was_read(tmp_path, caplog):
    tensors = {name.removeprefix("model."): array for name, array in stored("llama3").items()}
    path = folder(tmp_path / "model", "llama3", tensors)
    with contextlib.suppress(ModelFileError):  # the golden model has no tokenizer
        export_gguf(str(path), str(tmp_path / "model.gguf"), "f32")
    assert "lack 'model.'" in caplog.text
    caplog.clear()
    with contextlib.suppress(ModelFileError, ConfigError):
        train(config(tmp_path, model_config={}, model_name_or_path=str(path), max_length=16))
    assert "lack 'model.'" in caplog.text


def test_names_of_nothing_are_shown(tmp_path):
    tensors = {f"transformer.{name}": array for name, array in stored("llama3").items()}
    message = (
        r"'model.embed_tokens.weight' .* is missing; none of the model's tensors are there, but 'transformer.model."
    )
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(folder(tmp_path / "model", "llama3", tensors))


def test_a_single_file_beside_shards_is_taken_and_both_are_named(tmp_path):
    path = folder(tmp_path / "model", "llama3", stored("llama3"))
    shards(path, {name: np.zeros_like(array) for name, array in stored("llama3").items()})
    for beside in SHARDS[0], INDEX:
        checkpoint = open_checkpoint(path)
        assert_same(checkpoint, "llama3")
        (note,) = checkpoint.notes
        assert note.startswith(f"{SINGLE} is read, and ") and beside in note and "remove one of the two" in note
        (path / INDEX).write_text("{}")


def test_shards_without_an_index_are_read_if_they_are_complete(tmp_path):
    path = folder(tmp_path / "model", "llama3")
    shards(path, stored("llama3"))
    checkpoint = open_checkpoint(path)
    assert_same(checkpoint, "llama3")
    assert checkpoint.notes == (f"{INDEX} is missing: all 2 shards are read",)
    shards(path, stored("llama3"), stem="other")
    with pytest.raises(ModelFileError, match=r"shards of several models, model-\*-of-00002.safetensors and other-"):
        open_checkpoint(path)
    (path / SHARDS[0]).unlink()
    for shard in SHARDS:
        (path / shard.replace("model", "other")).unlink()
    with pytest.raises(ModelFileError, match=rf"{SHARDS[0]} is missing: fetch it again|neither"):
        open_checkpoint(path)
    shutil.copy(GOLDEN / "llama3" / SINGLE, path / SHARDS[0])
    shutil.copy(GOLDEN / "llama3" / SINGLE, path / SHARDS[1])
    with pytest.raises(ModelFileError, match=r"00002-of-00002.safetensors and .* both have tensor"):
        open_checkpoint(path)


def test_a_head_that_differs_from_tied_embeddings_is_used_and_named(tmp_path):
    tensors = stored("llama3")
    embedding = tensors["model.embed_tokens.weight"]
    same = tensors | {"lm_head.weight": embedding}
    assert open_checkpoint(folder(tmp_path / "same", "llama3", same, tie_word_embeddings=True)).notes == ()
    other = tensors | {"lm_head.weight": embedding[::-1].copy()}
    checkpoint = open_checkpoint(folder(tmp_path / "other", "llama3", other, tie_word_embeddings=True))
    np.testing.assert_array_equal(read_tensor(checkpoint.tensors["lm_head.weight"]), embedding[::-1])
    (note,) = checkpoint.notes
    assert "ties lm_head.weight to model.embed_tokens.weight, and the file has another one, which is used" in note
    alone = {name: array for name, array in same.items() if name != "model.embed_tokens.weight"}
    checkpoint = open_checkpoint(folder(tmp_path / "alone", "llama3", alone, tie_word_embeddings=True))
    np.testing.assert_array_equal(read_tensor(checkpoint.tensors["model.embed_tokens.weight"]), embedding)


@pytest.mark.parametrize("family, is_known", [("llama3", False), ("qwen3", False), ("glm4", True), ("qwen35", True)])
def test_a_partial_rotation_is_ignored_by_name_in_families_without_it(tmp_path, family, is_known):
    original = json.loads((GOLDEN / family / "config.json").read_text())
    name = "rope_parameters" if original.get("rope_parameters") else "rope_scaling"
    fields = {name: (original.get(name) or {}) | {"partial_rotary_factor": 0.5}}
    checkpoint = open_checkpoint(folder(tmp_path / "model", family, stored(family), **fields))
    notes = [note for note in checkpoint.notes if "partial_rotary_factor is 0.5" in note]
    head_dim = next(layer.attention.head_dim for layer in checkpoint.spec.layers if isinstance(layer.mixer, Attention))
    rotated = {rope.dims / head_dim for rope in checkpoint.spec.ropes.values()}
    assert (len(notes), rotated) == ((0, {0.5}) if is_known else (1, {1.0}))


def test_float64_is_refused_with_what_to_do(tmp_path):
    tensors = {name: array.astype(np.float64) for name, array in stored("llama3").items()}
    with pytest.raises(
        ModelFileError, match=r"has dtype F64; the known ones are F32, F16, BF16: save it as one of these"
    ):
        open_checkpoint(folder(tmp_path / "model", "llama3", tensors))

"""The safetensors header reader and whole folders against the safetensors package, and on lies of every kind."""

import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from ckdist.errors import ModelFileError
from ckdist.models.registry import known_families
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.safetensors import read_folder, read_safetensors
from ckdist.weights.unread import notes_on_unread
from tests.support.checkpoints import CONFIG, write_model
from tests.support.mutations import changes, mutated
from tests.support.paths import GOLDEN


def file_of(header, data=64, length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def entry(dtype="F32", shape=(4, 4), offsets=(0, 64)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


VALID = file_of({"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", (2,), (64, 68))}, 68)


def test_reads_what_the_package_wrote(tmp_path):
    arrays = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.ones(5, np.float16), "z": np.arange(3)}
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np"})
    stored = read_folder(tmp_path).tensors
    data = (tmp_path / "model.safetensors").read_bytes()
    assert {name: (t.dtype, t.shape) for name, t in stored.items()} == {
        "x": ("F32", (3, 4)),
        "y": ("F16", (5,)),
        "z": ("I64", (3,)),
    }
    for name, t in stored.items():
        assert data[t.offset : t.offset + t.nbytes] == arrays[name].tobytes()


PADDED = json.dumps({"a": entry()}).encode() + b"  "

LIES = {
    "empty": (b"", "header has 0 bytes, but the file has 0"),
    "length": (file_of({}, length=1 << 63), f"header has {1 << 63} bytes, but the file has 74"),
    "not JSON": (file_of(b"{nope"), "not JSON"),
    "not an object": (file_of(b"[]"), "not a JSON object but list"),
    "not UTF-8": (file_of(b'{"\xff":1}'), "not JSON"),
    "nesting": (file_of(b"[" * 100_000), "nested too deep"),
    "digits": (file_of(b'{"a":' + b"9" * 5000 + b"}"), "a number of 5000 digits, more than the 30"),
    "duplicate": (file_of(b'{"a":1,"a":2}'), "key 'a' stands there twice"),
    "entry": (file_of({"a": 3}), "'a' is described by int"),
    "dtype": (file_of({"a": entry("Q8_0")}), "dtype 'Q8_0'; the known ones are"),
    "dtype type": (file_of({"a": entry(["F32"])}), "has dtype"),
    "shape": (file_of({"a": entry(shape=(4, -4))}), r"shape \[4, -4\]; it must be"),
    "shape type": (file_of({"a": entry(shape=(4, 4.0))}), "it must be a list"),
    "true": (file_of({"a": entry(shape=(4, True))}), "it must be a list"),
    "dimensions": (file_of({"a": entry(shape=(1,) * 9)}), "up to 8 numbers"),
    "bytes": (
        file_of({"a": entry(shape=(4, 5))}),
        r"\[4, 5\] and dtype F32 takes 80 bytes, but data_offsets give it 64",
    ),
    "past the end": (file_of({"a": entry(offsets=(64, 128))}), "ends at byte 203, but the file has 139"),
    "backwards": (file_of({"a": entry(offsets=(64, 0))}), "two ascending numbers"),
    "negative": (file_of({"a": entry(offsets=(-64, 0))}), "two ascending numbers"),
    "a header one byte short": (
        file_of(PADDED, length=len(PADDED) - 1),
        "'a' ends at byte 138, but the file has 139 bytes: it is damaged",
    ),
    "a hole": (
        file_of({"a": entry(), "b": entry(offsets=(68, 132))}, 132),
        "'b' begins at byte .*, and not where 'a' ends at",
    ),
    "a hole before all": (
        file_of({"a": entry(offsets=(4, 68))}, 68),
        "'a' begins at byte .*, and not where 'the header' ends at",
    ),
    "bytes behind all": (file_of({"a": entry()}, 65), "'a' ends at byte .*: it is damaged, since tensors must fill it"),
    "overlap": (
        file_of({"a": entry(), "b": entry(shape=(4, 4), offsets=(32, 96))}, 96),
        "'b' begins at byte .*, before 'a' ends at",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_one_line_that_names_the_file(tmp_path, lie):
    data, message = LIES[lie]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=message) as e:
        read_safetensors(path)
    assert str(e.value).startswith(str(path)) and "\n" not in str(e.value)


def test_header_larger_than_the_cap(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(1 << 30)  # sparse
    with pytest.raises(ModelFileError, match="100000001 bytes, more than the 100000000 allowed"):
        read_safetensors(path)


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes(300, longest=6), st.integers(0, 30))
def test_mutated_bytes_parse_or_are_refused(tmp_path, places, cut):
    data = mutated(VALID, places)
    path = tmp_path / "model.safetensors"
    path.write_bytes(data[: len(data) - cut])
    try:
        stored = read_safetensors(path)
        assert sum(t.nbytes for t in stored.values()) == path.stat().st_size - min(
            (t.offset for t in stored.values()), default=path.stat().st_size
        )
    except ModelFileError as e:
        assert "\n" not in str(e)


@pytest.mark.parametrize("parts", [1, 3])
def test_open_folder(tmp_path, parts):
    arrays = write_model(
        tmp_path, parts=parts, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    )
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.format, checkpoint.folder, checkpoint.metadata["vocab_size"]) == ("safetensors", tmp_path, 10)
    assert set(checkpoint.tensors) == {n for n in arrays if "inv_freq" not in n}
    for name, source in checkpoint.tensors.items():
        np.testing.assert_array_equal(read_tensor(source), arrays[name])


def test_gemma_norms_gain_one_and_multimodal_names_lose_their_prefix(tmp_path):
    config = CONFIG | {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    arrays = write_model(tmp_path, config, prefix="language_model.", dtype=np.float16)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors["lm_head.weight"] is checkpoint.tensors["model.embed_tokens.weight"]
    for name, source in checkpoint.tensors.items():
        expected = arrays.get(name, arrays["model.embed_tokens.weight"]).astype(np.float32)
        np.testing.assert_array_equal(
            read_tensor(source), expected + 1 if expected.ndim == 1 else expected, err_msg=name
        )


def test_missing_and_misshapen_tensors(tmp_path):
    write_model(tmp_path, drop=["model.norm.weight"])
    with pytest.raises(ModelFileError, match=r"tensor 'model.norm.weight' of shape \(8,\) is missing"):
        open_checkpoint(tmp_path)
    write_model(tmp_path, **{"model.norm.weight": np.ones(9, np.float32)})
    with pytest.raises(ModelFileError, match=r"'model.norm.weight' has shape \(9,\), but the model needs \(8,\)"):
        open_checkpoint(tmp_path)
    write_model(tmp_path, drop=["lm_head.weight"])
    with pytest.raises(ModelFileError, match=r"'lm_head.weight' of shape \(10, 8\) is missing"):
        open_checkpoint(tmp_path)
    write_model(tmp_path, **{"model.norm.weight": np.ones(8, np.int64)})
    with pytest.raises(ModelFileError, match=r"'model.norm.weight' has dtype I64; the known ones are F32, F16, BF16"):
        open_checkpoint(tmp_path)


UNREAD = "the answers would be wrong without them"


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.down_proj.bias", "model.layers.1.mlp.up_proj.weight", "lm_head.bias", "score.weight"]
)
def test_a_tensor_that_nothing_reads_is_named(tmp_path, name):
    write_model(tmp_path, **{name: np.ones(3, np.float32)})
    with pytest.raises(ModelFileError, match=f"'{name}' has no place in a llama model of 1 layers: {UNREAD}"):
        open_checkpoint(tmp_path)


def test_many_tensors_that_nothing_reads_are_counted(tmp_path):
    write_model(tmp_path, parts=2, **{f"extra.{i}": np.ones(1, np.float32) for i in range(9)})
    index = tmp_path / "model.safetensors.index.json"
    forgets = json.loads(index.read_text())
    forgets["weight_map"] = {n: file for n, file in forgets["weight_map"].items() if not n.startswith("extra")}
    for content in (index.read_text(), json.dumps(forgets)):
        index.write_text(content)
        with pytest.raises(
            ModelFileError, match=r"9 tensors, 'extra.*', 'extra.*', 'extra.*' and 6 more, have no place"
        ):
            open_checkpoint(tmp_path)


def test_what_changes_no_answer_is_noted(tmp_path):
    one = np.ones(1, np.float32)
    beside = {
        "vision_tower.a.weight": one,
        "model.multi_modal_projector.b": one,
        "model.mtp_layers.0.c": one,
        "model.layers.1.mlp.d": one,
    }
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": one, "model.rotary_emb.inv_freq": one}
    write_model(tmp_path, CONFIG | {"num_nextn_predict_layers": 1}, **beside, **buffers)
    notes = open_checkpoint(tmp_path).notes
    assert len(notes) == 2 and "images are not read: 2 tensors, as " in notes[0] + notes[1]
    assert "without --spec mtp, tokens are predicted one at a time: 2 tensors, as " in notes[0] + notes[1]
    write_model(tmp_path)
    assert open_checkpoint(tmp_path).notes == ()


def test_an_output_matrix_of_a_tied_model(tmp_path):
    tied = CONFIG | {"tie_word_embeddings": True}
    rng = np.random.default_rng(1)
    embedding, other = rng.standard_normal((2, 10, 8)).astype(np.float32)
    write_model(tmp_path, tied, **{"model.embed_tokens.weight": embedding, "lm_head.weight": embedding})
    checkpoint = open_checkpoint(tmp_path)
    assert (
        checkpoint.spec.tie_embeddings
        and checkpoint.tensors["lm_head.weight"] is checkpoint.tensors["model.embed_tokens.weight"]
    )
    for head in (other, embedding.astype(np.float16)):
        write_model(tmp_path, tied, **{"model.embed_tokens.weight": embedding, "lm_head.weight": head})
        checkpoint = open_checkpoint(tmp_path)
        assert not checkpoint.spec.tie_embeddings
        np.testing.assert_array_equal(read_tensor(checkpoint.tensors["lm_head.weight"]), head)


def test_two_names_of_one_tensor_and_quantised_folders_are_refused(tmp_path):
    write_model(tmp_path, **{"language_model.model.norm.weight": np.ones(8, np.float32)})
    with pytest.raises(ModelFileError, match=r"and another tensor are both 'model.norm.weight'"):
        open_checkpoint(tmp_path)
    write_model(tmp_path, CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(
        ModelFileError,
        match=r"is quantised by 'gptq', which is not read; fp8, .* are: take the model as it was before, or a GGUF",
    ):
        open_checkpoint(tmp_path)


def test_an_index_that_lies(tmp_path):
    write_model(tmp_path, parts=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for name in (
        "../secret.safetensors",
        "/etc/passwd",
        "a/../b.safetensors",
        "..\\x.safetensors",
        "x.bin",
        "x\0.safetensors",
    ):
        index.write_text(json.dumps({"weight_map": good["weight_map"] | {"lm_head.weight": name}}))
        with pytest.raises(ModelFileError, match="not the name of a safetensors file in its folder"):
            open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {"extra": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"'extra' is in model-00001-of-00002.safetensors, but it is not among"):
        open_checkpoint(tmp_path)
    for bad in ([], {"weight_map": 3}, {"weight_map": {"a": 1}}):
        index.write_text(json.dumps(bad))
        with pytest.raises(ModelFileError, match=r"not a JSON object|no 'weight_map'"):
            open_checkpoint(tmp_path)
    index.write_text(json.dumps(good))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00002.safetensors is missing: .* names it among 2 files"):
        open_checkpoint(tmp_path)
    index.unlink()
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "family, layers, names",
    [
        ("deepseek_v3", 61, ["model.layers.61.eh_proj.weight", "model.layers.61.mlp.experts.255.up_proj.weight"]),
        ("deepseek_v3", 61, ["blk.61.nextn.eh_proj.weight", "blk.61.ffn_up_exps.weight"]),
        ("glm4moe", 46, ["model.layers.46.shared_head.norm.weight", "model.layers.46.embed_tokens.weight"]),
        ("glm4moe", 46, ["blk.46.nextn.shared_head_norm.weight", "blk.46.attn_q.weight"]),
        ("qwen3next", 48, ["mtp.fc.weight", "mtp.layers.0.mlp.experts.7.gate_proj.weight"]),
        ("mimo_v2_flash", 48, ["model.mtp.layers.0.eh_proj.weight", "model.mtp.layers.2.self_attn.q_proj.weight"]),
        ("nemotron_h", 52, ["mtp.layers.0.eh_proj.weight", "mtp.layers.1.mixer.experts.3.up_proj.weight"]),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(family, layers, names):
    """As published, in either format: one line. A layer that the model does not say predicts is an error."""
    (note,) = notes_on_unread(names, known_families()[family], layers, 1, "m")
    assert note == f"without --spec mtp, tokens are predicted one at a time: 2 tensors, as {names[0]!r}, stay unused"
    if "mtp." not in names[0]:
        with pytest.raises(ModelFileError, match=f"in a {family} model of {layers} layers"):
            notes_on_unread(names, known_families()[family], layers, 0, "m")


def test_keys_are_ignored_in_layers_that_read_the_cache_of_another_layer_alone(tmp_path):
    """Layers 3 to 5 of the golden Gemma 4 read the caches of layers before them."""
    arrays = load_file(GOLDEN / "gemma4" / "model.safetensors")
    (tmp_path / "config.json").write_bytes((GOLDEN / "gemma4" / "config.json").read_bytes())
    name = "model.layers.{}.self_attn.k_proj.weight"
    save_file({**arrays, name.format(4): arrays[name.format(1)]}, tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path)
    assert [i for i in range(6) if name.format(i) in opened.tensors] == [0, 1, 2]
    del arrays[name.format(1)]
    save_file(arrays, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"tensor 'model.layers.1.self_attn.k_proj.weight' .* is missing"):
        open_checkpoint(tmp_path)

"""Fields of PEFT's adapter_config.json: honoured, refused by name, or harmless."""

import json

import numpy as np
import pytest

from ckdist.errors import ModelFileError
from ckdist.weights.adapter_config import FIELDS, AdapterConfig, Rule
from ckdist.weights.adapter_file import WEIGHTS, load_adapter
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.safetensors_writer import TensorToWrite, write_safetensors
from tests.support.paths import GOLDEN

safetensors = pytest.importorskip("safetensors.numpy")
LORA = GOLDEN / "lora"
WRITTEN = json.loads((LORA / "llama3-patterns" / "adapter_config.json").read_text())  # by PEFT, all fields
QUERY = "model.layers.1.self_attn.q_proj"
BY_RULE = {rule: sorted(name for name, (of, _) in FIELDS.items() if of is rule) for rule in Rule}


def written(folder, **fields):
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | fields))
    return AdapterConfig(folder)


def test_the_table_has_the_fields_that_peft_writes():
    assert set(WRITTEN) == set(FIELDS)


@pytest.mark.parametrize("field", BY_RULE[Rule.REFUSED])
def test_what_would_change_the_answer_is_refused_by_name(tmp_path, field):
    for value in ("all", ["lm_head"], {"a": 1}, True, [3]):
        with pytest.raises(ModelFileError, match=rf"adapter_config.json: {field} is .*, which is not supported, since"):
            written(tmp_path, **{field: value})
    for empty in (None, False, [], {}, "none"):
        written(tmp_path, **{field: empty})


@pytest.mark.parametrize("field", BY_RULE[Rule.HARMLESS])
def test_what_is_harmless_changes_nothing(tmp_path, field):
    config = written(tmp_path, **{field: {"a": 1}})
    assert (config.rank(QUERY), config.scale(QUERY), config.is_module(QUERY)) == (4, 2.0, True)


def test_unknown_fields_are_refused_unless_they_are_empty(tmp_path):
    written(tmp_path, use_newer=False, newer_config=None)
    with pytest.raises(ModelFileError, match="use_newer is True, the field is not known"):
        written(tmp_path, use_newer=True)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga", 3])
def test_starts_that_change_the_base_are_refused(tmp_path, start):
    for plain in (True, False, "gaussian", "orthogonal", "eva", "mica"):
        written(tmp_path, init_lora_weights=plain)
    with pytest.raises(ModelFileError, match=r"init_lora_weights is .* path_initial_model_for_weight_conversion"):
        written(tmp_path, init_lora_weights=start)


@pytest.mark.parametrize(
    "pattern, matches",
    [
        ("q_proj", True),  # the end of a name after a dot
        ("proj", False),
        ("self_attn.q_proj", True),
        (r"layers\.1\..*", True),
        (r"^model\.layers\.1\.self_attn\.q_proj", True),
        (r"^layers\.1\.self_attn\.q_proj", False),
        (r"model\.layers\.[02]\..*", False),
        ("k_proj|q_proj", True),
        ("q_proj.weight", False),
    ],
)
def test_patterns_match_as_in_peft(tmp_path, pattern, matches):
    config = written(tmp_path, rank_pattern={pattern: 16}, alpha_pattern={pattern: 2})
    assert (config.rank(QUERY), config.scale(QUERY)) == ((16, 0.125) if matches else (4, 2.0))


def test_the_first_pattern_that_matches_counts(tmp_path):
    config = written(tmp_path, rank_pattern={"q_proj": 16, ".*": 2}, use_rslora=True)
    assert (config.rank(QUERY), config.scale(QUERY)) == (16, 2.0)
    assert config.rank("model.layers.1.self_attn.k_proj") == 2


@pytest.mark.parametrize(
    "fields, modules",
    [
        ({}, {0, 1, 2}),
        ({"target_modules": r"model\.layers\.[01]\..*"}, {0, 1}),
        ({"target_modules": "all-linear"}, {0, 1, 2}),
        ({"target_modules": ["model.layers.2.self_attn.q_proj"]}, {2}),
        ({"exclude_modules": ["layers.1.self_attn.q_proj"]}, {0, 2}),
        ({"exclude_modules": r".*\.1\..*"}, {0, 2}),
        ({"layers_to_transform": 1}, {1}),
        ({"layers_to_transform": [0, 2], "layers_pattern": "layers"}, {0, 2}),
        ({"layers_to_transform": [0], "layers_pattern": "blocks"}, set()),
        ({"target_modules": None, "target_parameters": ["mlp.experts.down_proj"]}, set()),
    ],
)
def test_modules_are_chosen_as_in_peft(tmp_path, fields, modules):
    config = written(tmp_path, **fields)
    assert {i for i in range(3) if config.is_module(f"model.layers.{i}.self_attn.q_proj")} == modules


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', and only LORA is read"),
        ({"r": 0}, "must have r, a whole number"),
        ({"lora_alpha": None}, "lora_alpha, a finite number"),
        ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern is .* must map names to a positive whole number"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is .* must map names to a finite number"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern is .* is no regular expression"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'"),
        ({"target_modules": "("}, "target_modules is .* is no regular expression"),
        ({"target_modules": {"q_proj": 1}}, "target_modules is .* must be a list of names"),
        ({"target_parameters": "q_proj.weight", "target_modules": None}, "target_parameters is .* list of names"),
        ({"layers_to_transform": "1"}, "layers_to_transform is '1', and must be numbers of layers"),
        ({"layers_to_transform": [1], "layers_pattern": "("}, "layers_pattern is .* is no regular expression"),
    ],
)
def test_malformed_fields_are_refused_by_name(tmp_path, fields, message):
    with pytest.raises(ModelFileError, match=message):
        config = written(tmp_path, **fields)
        config.is_module(QUERY) or config.is_parameter(f"{QUERY}.weight")


def adapter(folder, family, names, **fields):
    """An adapter of the golden model of zeros with rank 4."""
    checkpoint = open_checkpoint(GOLDEN / family)
    written(folder, **fields)
    tensors = {}
    for name in names:
        rows, columns = checkpoint.tensors[f"{name}.weight"].shape
        tensors[f"base_model.model.{name}.lora_A.weight"] = np.zeros((4, columns), np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = np.zeros((rows, 4), np.float32)
    safetensors.save_file(tensors, folder / "adapter_model.safetensors")
    return load_adapter(folder, checkpoint.spec)


def test_a_target_without_matrices_is_named_and_a_matrix_without_a_target_refused(tmp_path):
    queries = [f"model.layers.{i}.self_attn.q_proj" for i in range(len(open_checkpoint(GOLDEN / "llama3").spec.layers))]
    assert adapter(tmp_path, "llama3", queries).notes == ()
    (note,) = adapter(tmp_path, "llama3", queries[1:]).notes
    assert note.startswith("1 targeted module has no matrices") and queries[0] in note
    with pytest.raises(ModelFileError, match=r"layers.0.self_attn.q_proj.lora_A.weight, and .* puts no matrices there"):
        adapter(tmp_path, "llama3", queries, layers_to_transform=[1])


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_matrices_on_embeddings_are_refused_by_name(tmp_path, name):
    with pytest.raises(ModelFileError, match=rf"{name}.lora_A.weight' is not a matrix of LoRA on .* merge it"):
        adapter(tmp_path, "llama3", [name], target_modules=["lm_head", "embed_tokens"])


@pytest.mark.parametrize("largest", [(0.02, 3e-4), (1e-6, 900.0), (1e-9, 1e-9), (1e30, 1.0), (np.nan, 1.0)])
def test_matrices_of_16_bits_are_kept_in_float16_within_its_range(tmp_path, largest):
    """Else in float32."""
    written(tmp_path, lora_alpha=6)
    rng, stem, checkpoint = (
        np.random.default_rng(0),
        "model.layers.0.self_attn.q_proj",
        open_checkpoint(GOLDEN / "llama3"),
    )
    rows, columns = checkpoint.tensors[f"{stem}.weight"].shape
    shapes = {f"{stem}.lora_A.weight": (4, columns), f"{stem}.lora_B.weight": (rows, 4)}
    pair = {
        name: (np.float32(most * rng.uniform(-1, 1, shape)).view(np.uint32) >> 16 << 16).view(np.float32)
        for most, (name, shape) in zip(largest, shapes.items(), strict=True)
    }
    halves = [
        TensorToWrite(name, "BF16", array.shape, lambda array=array: array.view(np.uint16)[:, 1::2])
        for name, array in pair.items()
    ]
    write_safetensors(tmp_path / WEIGHTS, halves, {})
    found = load_adapter(tmp_path, checkpoint.spec).matrices
    fits = largest[0] < 1 and sum(largest) > 1e-8
    assert {matrix.dtype for matrix in found.values()} == {np.dtype(np.float16 if fits else np.float32)}
    a, b = (matrix.astype(float) for matrix in pair.values())
    low, values = (found[name] for name in shapes)
    np.testing.assert_allclose(values.astype(float) @ low, 1.5 * b @ a, rtol=0, atol=2.0**-11 * np.abs(b @ a).max())

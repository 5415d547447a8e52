"""config.json as published and as transformers saves it (golden/make_configs.py), and every field of its classes."""

import dataclasses
import json
from collections.abc import Collection

import numpy as np
import pytest

from ckdist.errors import ArchitectureError, ConfigError, ModelFileError
from ckdist.models.config_keys import REFUSED_UNLESS, UNUSED
from ckdist.models.registry import family_of_config, own_families, read_config, spec_from_config
from ckdist.train.model import open_model
from ckdist.weights.folder_checkpoint import with_generation_rules
from tests.support import tiny_training
from tests.support.cases import cases
from tests.support.paths import GOLDEN

CONFIGS = GOLDEN / "configs"
CLASSES = json.loads((CONFIGS / "classes.json").read_text())
TINY = json.loads((CONFIGS / "golden.json").read_text())
MODELS = sorted(path.parent.name for path in CONFIGS.glob("*/published.json"))
SAVED = sorted(path.parent.name for path in CONFIGS.glob("*/saved.json"))
NEVER_READ = {name for name in UNUSED if not name.endswith("token_id")}
REQUIRED = ("d_model", "hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")
REQUIRED += ("num_attention_heads", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
WITHOUT_EFFECT = {  # model -> fields whose value matters only together with another one
    "bert": ("pad_token_id",),  # where positions begin is RoBERTa's to say
    "bert_scorer": ("pad_token_id",),
    **dict.fromkeys(
        ("bailing_hybrid", "deepseek_v32", "glm_moe_dsa", "hy_v4"), ("first_k_dense_replace",)
    ),  # mlp_layer_types says it
    "dots1": ("max_window_layers",),
    "ernie4_5_moe": ("moe_layer_end_index",),  # which is the last layer
    "falcon_mamba": ("expand",),  # intermediate_size says it
    "falcon_h1": ("mamba_norm_before_gate",),  # without mamba_rms_norm
    **dict.fromkeys(("cwm", "granite_swa", "muse_glimmer"), ("rope_theta",)),  # the default of rope_parameters
    "cohere2_moe": ("prefix_dense_sliding_window_pattern", "shared_expert_combination_strategy"),  # in other layers
    "laguna": ("num_attention_heads", "rope_theta"),  # lists by layer and by kind of layer say it
    "step3p5": ("sliding_window", "num_sliding_attention_heads"),  # in layers that slide
    "mellum": ("rope_theta", "sliding_window"),  # the default of rope_parameters; in layers that slide
    "lfm2": ("block_multiple_of",),  # the size is a multiple of both
    "glm5_next": (  # linear_attn_config says it
        *("linear_conv_kernel_dim", "linear_head_dim", "linear_lower_bound", "linear_num_heads"),
    ),
    "kimi_linear": (  # mlp_layer_types and linear_attn_config say it
        *("first_k_dense_replace", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads"),
    ),
    "nomic_bert": ("max_position_embeddings",),  # no more than the 2048 that it was trained with
    "gemma4_moe": ("vocab_size_per_layer_input", "use_double_wide_mlp"),
    "llama4": ("intermediate_size_mlp", "interleave_moe_layer_step"),  # all layers have experts
    "gemma4_unified": ("use_double_wide_mlp",),
    "minimax_m3": ("index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks"),  # sparse layers
    "ministral3": ("rope_theta", "tie_word_embeddings"),  # the default of rope_parameters; the whole file has it
    "mistral4": ("rope_theta", "tie_word_embeddings"),
    "mistral_small3": ("tie_word_embeddings",),
    "qwen4_exp": ("make_ngram_vocab_size_divisible_by", "rope_theta"),  # rows are a multiple of both; rope_parameters
    **dict.fromkeys(("qwen2", "qwen25vl", "qwen3", "qwen3moe", "smollm3"), ("use_sliding_window", "max_window_layers")),
}


def read(name: str, form: str) -> dict:
    return json.loads((CONFIGS / name / f"{form}.json").read_text())


def numbers(spec) -> list:
    """All numbers of a spec, those of its rotations too, which == leaves out."""
    ropes = {**spec.ropes, **{f"{name} long": rope.long for name, rope in spec.ropes.items() if rope.long}}
    kept = lambda r: (r.inverse_frequencies.tolist(), r.theta, r.magnitude, r.interleaved, r.original_context)
    found = {name: kept(rope) for name, rope in ropes.items()}
    encoder = dataclasses.replace(spec.encoder, ropes={}) if spec.encoder else None
    return [dataclasses.replace(spec, ropes={}, encoder=encoder), found, spec.balance_coefficient]


def part_of(config: dict) -> dict:
    return config.get("text_config", config)


@cases("name", SAVED)
def test_a_published_config_and_what_transformers_saves_of_it_are_one_model(name):
    saved = with_generation_rules(read(name, "saved"), CONFIGS / name)
    assert numbers(spec_from_config(saved, "saved")) == numbers(spec_from_config(read(name, "published"), "published"))


@cases("folder", TINY)
def test_a_tiny_model_that_transformers_saves_again_is_the_same(folder):
    saved, config = TINY[folder], json.loads((GOLDEN / folder / "config.json").read_text())
    assert numbers(spec_from_config(saved, "saved")) == numbers(spec_from_config(config, "config"))
    assert read_config(saved, "saved")[1] == []


@cases("name", MODELS)
def test_no_published_or_saved_config_has_a_field_that_is_not_known(name):
    for form in ("published", "saved") if name in SAVED else ("published",):
        assert read_config(read(name, form), form)[1] == []


def test_every_family_has_a_published_config():
    read_ones = {spec_from_config(read(name, "published"), name).family for name in MODELS}
    assert set(own_families()) - read_ones == {"glm4v_moe"}  # GLM-4.5's, with images


def outcome(config: dict) -> list | str:
    """The numbers of a config, or why it is refused."""
    try:
        return numbers(spec_from_config(config, "here"))
    except (ArchitectureError, ModelFileError) as error:
        return str(error)


def with_field(config: dict, name: str, *value: object) -> dict:
    """A config with one field of its language part set, or without it."""
    return with_fields(config, [name], dict.fromkeys([name][: len(value)], *value))


def with_fields(config: dict, names: Collection[str], values: dict) -> dict:
    """A config whose language part has these values, and no others of these fields."""
    part = {key: old for key, old in part_of(config).items() if key not in names} | values
    outer = {key: old for key, old in config.items() if key != "tie_word_embeddings"}  # else it would say it first
    return {**outer, "text_config": part} if "text_config" in config else part


def other_value(value: object) -> object:
    """One that means something else and may be read."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    return ("silu" if "gelu" in value else "gelu") if isinstance(value, str) else None


@cases("name", SAVED)
def test_an_absent_field_is_the_default_of_its_class_and_a_null_is_absent_or_in_the_familys_table(name):
    config = read(name, "saved")
    part, keys = part_of(config), family_of_config(config, name).keys
    fields = CLASSES[part["model_type"]]["fields"]
    without = {field: default for field, default in fields.items() if field in NEVER_READ}
    same = outcome(with_fields(config, (), {}))
    for values in ({}, dict.fromkeys(without), without):
        assert outcome(with_fields(config, without, values)) == same
    for field, default in fields.items():
        if field in without:
            continue
        absent = outcome(with_field(config, field)) if field in part else same
        if keys.aliases.get(field, field) not in keys.nulls:
            assert outcome(with_field(config, field, None)) == absent, field
        if default is None or isinstance(default, dict) or field in keys.aliases:  # said by other fields
            continue
        missing = isinstance(absent, str) and absent.endswith(f"{field} is missing")
        assert outcome(with_field(config, field, default)) == absent or (missing and field in REQUIRED), field


@cases("name", SAVED)
def test_each_field_of_a_class_has_an_effect_is_refused_or_is_known_to_have_none(name):
    config = read(name, "saved")
    keys = family_of_config(config, name).keys
    for whole in ("layer_types", "rope_parameters", "no_rope_layers"):  # which say what other fields would
        shorter = with_field(config, whole)
        config = config if isinstance(outcome(shorter), str) else shorter
    before = outcome(config)
    assert isinstance(before, list)
    for field, default in CLASSES[part_of(config)["model_type"]]["fields"].items():
        present = part_of(config).get(field, default)
        changed = other_value(present)
        if changed is None or field in UNUSED or field in keys.unused or field in WITHOUT_EFFECT.get(name, ()):
            continue
        after = outcome(with_field(config, field, changed))
        assert after != before, f"{field}: {present} and {changed} are one model"


@cases("name", SAVED)
def test_the_other_names_of_a_class_mean_the_same(name):
    config = read(name, "saved")
    part = part_of(config)
    keys = family_of_config(config, name).keys
    for alias, field in CLASSES[part["model_type"]]["aliases"].items():
        if alias in keys.unused or field in UNUSED or part.get(field, part.get(alias)) is None:
            continue
        value = part.get(field, part.get(alias))
        without = with_field(with_field(config, field), alias)
        assert outcome(with_field(without, alias, value)) == outcome(with_field(without, field, value)), alias
        another = [*value, value[0]] if isinstance(value, list) else value + 1
        error = outcome(with_field(with_field(without, field, value), alias, another))
        assert "both mean the same: keep one" in error


LLAMA = read("llama2", "published")


def test_a_field_that_the_family_does_not_know_is_named():
    assert read_config(LLAMA | {"logit_softcap": 30.0, "another": 0}, "here")[1] == ["logit_softcap is 30.0"]
    nested = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "gamma": 3}}
    assert read_config(LLAMA | nested, "here")[1] == ["rope_parameters.gamma is 3"]


@pytest.mark.parametrize("field", REFUSED_UNLESS)
def test_what_llama_does_not_compute_is_refused_by_name(field):
    if field in ("attention_bias", "mlp_bias"):
        return  # which it does
    value = {"causal": False, "clip_qkv": 8.0, "pruned_heads": {"0": [1]}}.get(field, True)
    with pytest.raises(ModelFileError, match=f"here: {field} is .*another value is not supported here"):
        spec_from_config(LLAMA | {field: value}, "here")


def test_dynamic_scaling_is_none_up_to_the_original_context():
    plain = spec_from_config(LLAMA, "here")
    dynamic = spec_from_config(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "here")
    np.testing.assert_array_equal(
        dynamic.ropes["global"].inverse_frequencies, plain.ropes["global"].inverse_frequencies
    )
    assert dynamic.max_position == plain.max_position == 4096  # further ones are refused


@pytest.mark.parametrize(
    "name, function", [("gelu", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh")]
)
def test_gated_feed_forwards_take_gelu(name, function):
    for model in ("llama2", "mixtral"):
        spec = spec_from_config(read(model, "published") | {"hidden_act": name}, "here")
        assert {layer.ffn.activation for layer in spec.layers} == {function}


def test_a_gate_that_gguf_readers_do_not_compute_is_refused():
    spec = spec_from_config(LLAMA | {"hidden_act": "gelu"}, "here")
    with pytest.raises(
        ArchitectureError, match="llama with the activation gelu has no GGUF form: its readers compute silu"
    ):
        own_families()["llama"].gguf_form(spec, "here")


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"hidden_act": "gelu"}, "the gate function gelu can be served, not trained; silu, gelu_tanh, .* can"),
        ({"hidden_sizes": 8}, "model_config: hidden_sizes is 8, and llama has no such field: remove or correct it"),
    ],
)
def test_a_training_refuses_a_gate_without_a_gradient_and_fields_that_are_not_known(tmp_path, fields, said):
    with pytest.raises(ConfigError, match=said):
        open_model(tiny_training.config(tmp_path, model_config=tiny_training.MODEL | fields))


HOSTILE = (7, "x", [7], [{}], {"1": 5}, {"9" * 5000: {}})


def is_refused(config: dict, name: str) -> bool:
    """True for a refusal in one line. Any other error fails the test."""
    try:
        read_config(config, name)
    except (ArchitectureError, ModelFileError):
        return True
    return False


def test_a_field_of_any_type_is_read_or_refused_in_one_line():
    """Fields that a family does not read are changed together, and one by one only if a family reads one of them."""
    for name in MODELS:
        whole = read(name, "published")
        keys = family_of_config(whole, name).keys
        fields = {*part_of(whole), *keys.defaults, *keys.aliases, *keys.nulls, *keys.unused, "layer_types"}
        fields -= {"architectures", "model_type"}
        for value in HOSTILE:
            together = with_fields(whole, fields & NEVER_READ, dict.fromkeys(fields & NEVER_READ, value))
            for field in fields if is_refused(together, name) else fields - NEVER_READ:
                try:
                    is_refused(with_field(whole, field, value), name)
                except Exception as error:
                    raise AssertionError(f"{name}: {field} = {value!r:.40}") from error

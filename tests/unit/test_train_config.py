"""The configuration of a training: TOML, --set, and what is said of mistakes."""

import json

import pytest
import tomllib

from ckdist.errors import ConfigError
from ckdist.models.registry import spec_from_config
from ckdist.train.config import OTHER_NAMES, TrainConfig, load_config
from ckdist.train.model import balanced
from ckdist.train.resumption import NAMED, REFUSED
from ckdist.weights.checkpoint import open_checkpoint
from tests.support.paths import GOLDEN, ROOT

ZERO = "model_name_or_path = 'm'\nzero_stage = 3\n"


def write(tmp_path, text: str) -> str:
    (tmp_path / "c.toml").write_text('output_dir = "out"\ntrain_file = ["a.txt"]\n' + text)
    return str(tmp_path / "c.toml")


def test_fields_and_overrides(tmp_path):
    path = write(tmp_path, "learning_rate = 1\n[model_config]\nhidden_size = 8\n")
    config = load_config(
        path,
        ["model_config.vocab_size=32", "bf16=false", "seed=7", "train_file=['b.txt', \"c d.txt\"]", "output_dir=a=b"],
    )
    assert (config.learning_rate, config.bf16, config.seed) == (1.0, False, 7) and type(config.learning_rate) is float
    assert config.model_config == {"hidden_size": 8, "vocab_size": 32}
    assert config.train_file == ("b.txt", "c d.txt") and config.output_dir == "a=b"


@pytest.mark.parametrize(
    "text, said",
    [
        ("learning_rat = 1e-3", "unknown field 'learning_rat', did you mean learning_rate?"),
        ("seed = 1.5", "seed (1.5) must be a whole number"),
        ("bf16 = 1", "bf16 (1) must be true or false"),
        (f"seed = 0x{'f' * 5000}", "seed (a huge number) must be from 0 to"),
        (f"learning_rate = 0x{'f' * 5000}", "learning_rate (a huge number) must be from 0 to"),
        (f"seed = {'9' * 5000}", "cannot read"),
        ('optim = "a\\nb"', r"optim (a\nb) must be one of"),
        ("optim = 'adam'", "optim (adam) must be one of adamw, sgd"),
        ("max_length = 1", "max_length (1) must be from 2 to"),
        ("train_on = [", "cannot read"),
        ("lora_r = 4\n[model_config]\nvocab_size = 5", "lora_r (4) needs a model to continue from"),
        ("report_to = ['visdom']", "report_to (visdom) must be one of tensorboard, wandb, mlflow"),
        ("", "and neither is given"),
        (ZERO + "method = 'dpo'", "method (dpo) must be sft with zero_stage 3: set zero_stage to 1"),
        (ZERO + "lora_r = 4", "lora_r (4) must be 0 with zero_stage 3: set zero_stage to 2"),
        ("model_name_or_path = 'm'\n[model_config]\nvocab_size = 5", "and both are given"),
    ],
)
def test_mistakes_are_one_line(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_every_field_has_a_meaning_and_is_documented():
    for name, item in TrainConfig.__dataclass_fields__.items():  # the reference is written from these
        assert item.metadata["help"], name


def test_the_example_is_a_configuration():
    config = load_config(str(ROOT / "examples" / "train_tiny.toml"))
    assert (
        config.model_config["vocab_size"]
        == tomllib.loads((ROOT / "examples" / "train_tiny.toml").read_text())["model_config"]["vocab_size"]
    )


@pytest.mark.parametrize(
    "family, given, found",
    [("mixtral", 0.5, 0.5), ("mixtral", -1.0, 0.0), ("deepseek_v3", 0.0, 0.0), ("llama3", -1.0, 0.0)],
)
def test_the_coefficient_of_the_loss_that_balances_experts(family, given, found):
    assert balanced(open_checkpoint(GOLDEN / family).spec, given).balance_coefficient == found


@pytest.mark.parametrize("family", ["deepseek_v3", "llama3"])
def test_nothing_to_balance(family):
    message = r"router_aux_loss_coef \(0.5\) is for experts that a softmax chooses, and \w+ has none: set it to 0"
    with pytest.raises(ConfigError, match=message):
        balanced(open_checkpoint(GOLDEN / family).spec, 0.5)


def test_the_models_own_coefficient():
    """It counts where routers' logits are an output, as in transformers."""
    values = json.loads((GOLDEN / "mixtral" / "config.json").read_text()) | {"router_aux_loss_coef": 0.02}
    for output, found in ((True, 0.02), (False, 0.0)):
        spec = spec_from_config({**values, "output_router_logits": output}, "config.json")
        assert spec.balance_coefficient == found


@pytest.mark.parametrize(
    "name, said",
    [
        ("lr", "did you mean learning_rate?"),
        ("max_seq_length", "did you mean max_length?"),
        ("gradient_checkpointing", "did you mean activation_checkpointing?"),
        ("lora_scale", "; those that begin with lora are lora_r, lora_alpha, lora_target_modules"),
        ("packing", "; the nearest is "),
    ],
)
def test_an_unknown_field_is_answered_by_the_one_that_is_meant(tmp_path, name, said):
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, f"{name} = 1"))
    hint = str(caught.value).partition(f"unknown field '{name}'")[2]
    assert hint.removeprefix(", ").startswith(said) and hint.endswith(
        "'Fields of a training' in the documentation lists all"
    )
    assert len(hint) < 250


def test_names_of_other_trainers_lead_to_fields():
    assert set(OTHER_NAMES.values()) <= set(TrainConfig.__dataclass_fields__)
    assert not set(OTHER_NAMES) & set(TrainConfig.__dataclass_fields__)


# The tokens' digest covers these four.
OF_THE_DATA = ("train_file", "text_column", "bad_lines", "tokenizer_name")
# These change the result only by rounding.
WITHOUT_EFFECT = (
    "output_dir", "cache_dir", "activation_checkpointing", "tensor_parallel_size", "data_parallel_size",
    "sequence_parallel_size", "pipeline_parallel_size", "virtual_pipeline_parallel_size", "expert_parallel_size",
    "zero_stage", "threads", "transport", "ddp_timeout", "logging_steps", "eval_steps", "samples", "early_stopping",
    "save_steps", "save_total_limit", "resume",
    "save_dtype", "report_to", "encrypt", "trace",
)  # fmt: skip


def test_every_field_has_a_place_among_those_that_may_change_at_resume():
    groups = [*REFUSED, *NAMED, *OF_THE_DATA, *WITHOUT_EFFECT]
    assert sorted(groups) == sorted(TrainConfig.__dataclass_fields__)

"""The configuration of a training: TOML, --set, and what is said of mistakes."""

import pytest
import tomllib

from ckdist.errors import ConfigError
from ckdist.train.config import TrainConfig, load_config
from tests.support.paths import ROOT


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
        ("optim = 'adam'", "optim (adam) must be one of adamw, sgd"),
        ("max_length = 1", "max_length (1) must be from 2 to"),
        ("train_on = [", "cannot read"),
        ("lora_r = 4\n[model_config]\nvocab_size = 5", "lora_r (4) needs a model to go on from"),
        ("report_to = ['wandb']", "report_to (wandb) must be tensorboard"),
        ("", "and neither is given"),
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

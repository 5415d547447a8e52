"""rope_scaling of a training: the configuration that the result has."""

from dataclasses import replace

import numpy as np
import pytest

from ckdist.errors import ConfigError
from ckdist.models import rope, rope_scaling
from ckdist.models.registry import read_config
from ckdist.train.config import TrainConfig, load_config
from ckdist.train.longer_context import parse, stretched
from ckdist.train.model import open_model
from ckdist.train.tuning import as_toml
from tests.support.paths import GOLDEN

BASE = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}


def settings(**fields) -> TrainConfig:
    return TrainConfig(output_dir="out", train_file=("a.txt",), **fields)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("linear", lambda plain: plain / 4),
        ("yarn", lambda plain: rope_scaling.yarn(plain, 5e5, 4.0, 2048, 32.0, 1.0)),
        ("llama3", lambda plain: rope_scaling.llama3(plain, 4.0, 1.0, 4.0, 2048)),
    ],
)
@pytest.mark.parametrize("own", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}])
def test_rotations_and_positions(kind, expected, own):
    values = stretched({**BASE, **own}, {"rope_type": kind, "factor": 4})
    spec = read_config(values, "config.json")[0]
    assert spec.max_position == values["max_position_embeddings"] == 8192
    np.testing.assert_allclose(spec.ropes["global"].inverse_frequencies, expected(rope.plain(16, 5e5)), rtol=1e-6)
    again = stretched(values, {"rope_type": kind, "factor": 8})
    assert again["max_position_embeddings"] == 8 * 2048


def test_a_flag_is_written_to_the_settings_file(tmp_path):
    config = settings(model_name_or_path="m", rope_scaling=parse("yarn:4"))
    assert 'rope_scaling = {rope_type = "yarn", factor = 4.0}' in as_toml(config)
    config = replace(config, train_file=('日記 😀 "a".jsonl',))
    (tmp_path / "train.toml").write_text(as_toml(config))
    assert load_config(str(tmp_path / "train.toml")) == config
    with pytest.raises(ConfigError, match=r"yarn:x.*must be KIND:FACTOR"):
        parse("yarn:x")


def test_a_models_positions_grow():
    model = open_model(settings(model_name_or_path=str(GOLDEN / "llama2"), rope_scaling=YARN, max_length=1024))
    assert model.spec.ropes["global"].scaling["rope_type"] == "yarn"
    assert read_config(model.config, "config.json")[0].ropes == model.spec.ropes


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_config": BASE}, "rope_scaling is for a model to continue from: set model_config.rope_scaling"),
        ({"model_name_or_path": str(GOLDEN / "llama2"), "lora_r": 4}, "rope_scaling cannot be recorded in an adapter"),
        (
            {"model_name_or_path": str(GOLDEN / "llama2"), "rope_scaling": {"rope_type": "su"}},
            "rope_type 'su' and factor None: it needs one of linear, yarn, llama3, and a factor",
        ),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ConfigError, match=message):
        open_model(settings(**{"rope_scaling": YARN, "max_length": 32, **fields}))


def test_layers_with_rotations_of_their_own_are_refused():
    with pytest.raises(ConfigError, match="its layers differ"):
        stretched({**BASE, "rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, YARN)

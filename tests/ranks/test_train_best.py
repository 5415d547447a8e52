"""Early stopping: the model is that of the smallest validation loss, also over two ranks and after a stop."""

import json
import logging

import numpy as np
import pytest

from ckdist.errors import ConfigError
from ckdist.train.trainer import Trainer, train
from ckdist.weights.checkpoint import open_checkpoint
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config

# A rate that overshoots: validation losses fall at first, and rise again.
OWN = {"max_steps": 40, "eval_steps": 1, "early_stopping": 2, "lr_scheduler_type": "constant", "save_steps": 3}
OWN |= {"learning_rate": 0.12, "validation_split_percentage": 20.0, "warmup_steps": 0}


def reports(c, ranks: int = 1, **more) -> list:
    found: list = []
    run_threads(ranks, lambda world: train(c, found.append if world.rank == 0 else None, world=world, **more))
    return found


def test_the_best_model_is_kept_and_training_ends(tmp_path):
    for name in ("whole", "best", "parts", "two"):
        (tmp_path / name).mkdir()
    whole = reports(config(tmp_path / "whole", **OWN))
    losses = [report.eval_loss for report in whole]
    best = int(np.argmin(losses))
    assert len(losses) == best + 3 < 40, losses
    weights = (tmp_path / "whole" / "out" / "model" / "model.safetensors").read_bytes()
    reports(config(tmp_path / "best", **OWN | {"max_steps": best + 1, "early_stopping": 0}))
    assert weights == (tmp_path / "best" / "out" / "model" / "model.safetensors").read_bytes()
    assert not reports(config(tmp_path / "whole", **OWN)), "the same command has nothing left to do"
    c, asked = config(tmp_path / "parts", **OWN), []
    parts = reports(c, should_stop=lambda: asked.append(1) or len(asked) == best + 2) + reports(c)
    assert [report.eval_loss for report in parts] == losses
    assert weights == (tmp_path / "parts" / "out" / "model" / "model.safetensors").read_bytes()
    two = reports(config(tmp_path / "two", **OWN, per_device_train_batch_size=3), 2)
    assert [report.eval_loss for report in two] == pytest.approx(losses, rel=1e-2)
    state = json.loads(next((tmp_path / "two" / "out").glob(f"checkpoint-{best + 3}/trainer_state.json")).read_text())
    assert json.dumps(state).count(f'"best_step": {best + 1}') == 1


def test_the_last_model_is_written_if_no_validation_loss_is_finite(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "evaluate", lambda _: float("nan"))
    assert len(reports(config(tmp_path, **OWN))) == 2
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


def test_a_base_with_the_new_name_of_its_type_gives_a_model_that_loads(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    train(config(tmp_path / "first", max_steps=1))
    folder = tmp_path / "first" / "out" / "model"
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": fields.pop("torch_dtype")}))
    train(
        config(tmp_path / "second", model_config={}, model_name_or_path=str(folder), max_steps=1, save_dtype="float32")
    )
    assert open_checkpoint(str(tmp_path / "second" / "out" / "model")).spec.hidden_size == 32


def test_samples_are_continued_by_the_weights_in_training(tmp_path, caplog):
    """After some steps the model repeats what the texts have most; on two ranks the samples are equal."""
    own = {"samples": 2, "eval_steps": 8, "validation_split_percentage": 20.0, "learning_rate": 2e-2}
    said = []
    for name, ranks in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        with caplog.at_level(logging.INFO):
            reports(config(tmp_path / name, **own, per_device_train_batch_size=6 // ranks), ranks)
        said.append([line for line in caplog.messages if line.startswith("step 8 sample: ")])
        caplog.clear()
    assert said[0] == said[1] and len(said[0]) == 2, said
    assert all(" → '" in line for line in said[0])
    with pytest.raises(ConfigError, match=r"samples \(2\) must be 0 with pipeline_parallel_size 2"):
        config(tmp_path, samples=2, pipeline_parallel_size=2)


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="needs validation losses: set eval_steps"):
        config(tmp_path, early_stopping=1)
    with pytest.raises(ConfigError, match="needs validation data: set validation_file"):
        reports(config(tmp_path, **OWN | {"validation_split_percentage": 0.0}))

"""Faults of a training that used to pass in silence: cut answers, steps that are not finite, other settings at resume,
rows that are not validated on, and a peak that is exceeded.
"""

import json
import pathlib
import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from ckdist.errors import ConfigError, EngineError
from ckdist.train import guards, trainer
from ckdist.train.batch import PackedBatch
from ckdist.train.guards import MOST_IN_A_ROW
from ckdist.train.trainer import train
from ckdist.train.training_checkpoint import verify
from tests.support.launcher import run_ranks
from tests.support.reference_training import reference_executable
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config, toml


def chats(folder: pathlib.Path, words: int, count: int = 6) -> str:
    said = [
        {"role": "user", "content": " ".join(["word"] * words)},
        {"role": "assistant", "content": "yes"},
    ]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': said})}\n" * count)
    return str(folder / "chats.jsonl")


def curve_of(made, c, on_step=None, ranks: int = 1) -> None:
    """Trains with other executables."""
    with mock.patch("ckdist.train.trainer.native_executable", made):
        run_threads(ranks, lambda world: train(c, on_step, world=world))


def broken(steps: set[int], value: float = np.inf):
    """An executable whose gradient, or loss if `value` is NaN, is not finite in these calls, from 1."""

    class Broken:
        gathers, gradient_share = False, None

        def __init__(self, *arguments):
            self.inner, self.calls = reference_executable(*arguments), 0
            names = ("parameters", "gradients", "loss", "balance", "waited", "zero_grad", "flush")
            for name in names:
                setattr(self, name, getattr(self.inner, name))

        def forward_backward(self, batch, reduce, *place):
            self.calls += 1
            loss = self.inner.forward_backward(batch, reduce, *place)
            if self.calls not in steps:
                return loss
            if np.isnan(value):
                return value
            self.gradients.flat[5] = value
            return loss

    return Broken


def test_a_training_whose_answers_are_all_cut_stops_before_its_first_step(tmp_path):
    path = toml(tmp_path, train_file=chats(tmp_path, 99))
    done = run_ranks(1, "-m", "ckdist.cli.main", "train", str(path), timeout=60)
    assert done.returncode == 2 and "step 1" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"ckdist: train_file has no answer left to learn: .*chats\.jsonl:1 with \d+ tokens", done.stderr)
    assert not (tmp_path / "out" / "model").exists()


def test_all_ranks_stop_if_no_answer_is_left(tmp_path):
    c = config(tmp_path, train_file=chats(tmp_path, 99), per_device_train_batch_size=3)
    with pytest.raises(ConfigError, match="no answer left to learn"):
        run_threads(2, lambda world: train(c, world=world))


def test_what_is_cut_and_what_is_not_validated_on_is_said(tmp_path, caplog):
    (tmp_path / "a").mkdir()
    long = pathlib.Path(chats(tmp_path / "a", 99, 1))
    files = (chats(tmp_path, 2, 700), str(long), str(long), f"{tmp_path}/*.jsonl")
    train(config(tmp_path, max_steps=1, train_file=files, validation_file=files[0]))
    assert "train_file: 1 of 701 chats are longer than max_length (32) and are truncated, as " in caplog.text
    assert f"{long}:1 with" in caplog.text and f"{long} is named twice, and is read once" in caplog.text
    assert "chats.jsonl is in train_file and in validation_file" in caplog.text
    assert re.search(r"the validation loss is taken on the first 256 of \d+ rows of max_length", caplog.text)


def test_a_training_that_diverges_ends_with_one_line_and_no_model(tmp_path):
    path = toml(tmp_path, max_steps=40, learning_rate=1000.0, lr_scheduler_type="constant", warmup_steps=0)
    done = run_ranks(1, "-m", "ckdist.cli.main", "train", str(path), timeout=60)
    line = r"ckdist: training ends at step \d+ of 40, and no model is written: \d+ steps were lost.*lower learning_rate"
    assert done.returncode == 1 and re.search(line, done.stderr) and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(
    "steps, ends",
    [
        (set(range(2, 2 + MOST_IN_A_ROW)), MOST_IN_A_ROW + 1),  # in a row
        ({1, 5, 9, 13, 17, 21, 25}, 25),  # 7 of 60
    ],
)
def test_too_many_skipped_steps_end_a_training(tmp_path, steps, ends):
    c = config(tmp_path, max_steps=200 if len(steps) == MOST_IN_A_ROW else 60)
    reports: list = []
    with pytest.raises(EngineError, match=f"ends at step {ends} of .*: {len(steps)} steps were lost"):
        curve_of(broken(steps), c, reports.append)
    assert len(reports) == ends and not (tmp_path / "out" / "model").exists()


def test_a_loss_that_is_not_finite_changes_nothing(tmp_path, caplog):
    c = config(tmp_path, max_steps=3)
    with caplog.at_level("INFO"):
        curve_of(broken({2}, np.nan), c)
    assert "step 2 is skipped: its loss is nan, and nothing was changed" in caplog.text
    assert (verify(tmp_path / "out" / "checkpoint-3").updates, caplog.text.count("is skipped")) == (2, 1)


def test_a_spike_is_skipped_or_goes_back_on_all_ranks(tmp_path, caplog, monkeypatch):
    """A gradient that is 1000 times too large in step 7, with checkpoints every 4 steps."""
    monkeypatch.setattr(guards, "FIRST_UPDATES", 3)

    class Spiking(broken(set())):
        def forward_backward(self, *arguments):
            loss = super().forward_backward(*arguments)
            self.gradients.flat[:] *= 1000.0 if self.calls == 7 else 1.0
            return loss

    made = {}
    for action in ("skip", "back", "stop"):
        (tmp_path / action).mkdir()
        c = config(tmp_path / action, on_spike=action, max_steps=9, per_device_train_batch_size=3)
        work = lambda c=c: curve_of(Spiking, c, ranks=2)
        if action == "stop":
            with pytest.raises(EngineError, match=r"ends at step 7 of 9.*its loss is .*\(on_spike is stop\)"):
                work()
            continue
        with caplog.at_level("INFO"):
            work()
        state = verify(tmp_path / action / "out" / "checkpoint-9")
        made[action] = state.updates, state.skipped_steps
    assert made == {"skip": (8, 1), "back": (6, 1)}  # steps 5, 6 and 7 are lost
    assert "step 7 is skipped: its loss is " in caplog.text and "the weights are those of step 4 again" in caplog.text


def test_a_loss_that_is_not_finite_goes_back(tmp_path, caplog):
    c = config(tmp_path, max_steps=20, on_nan="back")
    with caplog.at_level("INFO"):
        curve_of(broken({2, 5}, np.nan), c)
    assert "there is no checkpoint to go back to yet" in caplog.text
    assert "step 5: the weights are those of step 4 again" in caplog.text
    assert verify(tmp_path / "out" / "checkpoint-20").updates == 18


def test_a_model_without_a_gradient_ends_its_training(tmp_path):
    class Dead(broken(set())):
        def forward_backward(self, *arguments):
            loss = super().forward_backward(*arguments)
            self.gradients.flat[:] = 0
            return loss

    with pytest.raises(EngineError, match=rf"ends at step {MOST_IN_A_ROW} of 200.*its gradient's norm is 0.0\)"):
        curve_of(Dead, config(tmp_path, max_steps=200))


def test_batches_without_a_target_make_no_model(tmp_path):
    none = lambda step, rank, size: [PackedBatch(np.arange(4), np.full(4, -1), np.array([0, 4]))]
    with pytest.raises(EngineError, match=r"none of the 2 steps changed the model, .*: it has no token with a target"):
        train(config(tmp_path, max_steps=2), batches=none)
    assert not (tmp_path / "out" / "model").exists()


def test_a_resumed_run_refuses_or_names_other_settings(tmp_path, caplog):
    c = config(tmp_path, max_steps=4, save_total_limit=0)
    train(c)
    for name, value in (("max_length", 16), ("optim", "sgd"), ("validation_split_percentage", 10.0)):
        with pytest.raises(ConfigError, match=rf"checkpoint-4 was trained with {name} .*, and {name} is {value}"):
            train(replace(c, max_steps=6, **{name: value}))
    caplog.clear()
    train(replace(c, max_steps=6, learning_rate=6e-3, save_steps=3, threads=2))
    (line,) = [r.getMessage() for r in caplog.records if "other settings" in r.getMessage()]
    assert "checkpoint-4 was trained with other settings: " in line and "save_steps" not in line
    assert "max_steps 4 → 6, learning_rate 0.003 → 0.006, steps 4 → 6, learning rate of the next step " in line
    caplog.clear()
    train(replace(c, max_steps=6, learning_rate=6e-3))
    assert "other settings" not in caplog.text, "a change is named once"


def test_a_longer_run_names_the_jump_of_its_learning_rate(tmp_path, caplog):
    c = config(tmp_path, max_steps=-1, lr_scheduler_type="linear", warmup_steps=0)
    steps = train(c)
    train(replace(c, num_train_epochs=2.0))
    assert steps and re.search(
        rf"num_train_epochs 1.0 → 2.0, steps {steps.step} → {2 * steps.step}, "
        r"learning rate of the next step 7.32e-05 → 0.0015",
        caplog.text,
    )


def test_a_lora_is_not_taken_up_with_another_alpha(tmp_path):
    base = config(tmp_path, max_steps=1)
    train(base)
    model = str(tmp_path / "out" / "model")
    lora = replace(base, model_config={}, model_name_or_path=model, output_dir=str(tmp_path / "lora"), lora_r=2)
    train(lora)
    with pytest.raises(ConfigError, match=r"with lora_alpha 16.0, and lora_alpha is 64.0: .* another factor"):
        train(replace(lora, lora_alpha=64.0))


@pytest.mark.parametrize("measured", [1e3, 1e18])
def test_a_part_of_the_peak_is_at_most_all_of_it_and_says_of_which_rate(tmp_path, caplog, monkeypatch, measured):
    monkeypatch.setattr(trainer, "arithmetic_rate", lambda *_: measured)
    with caplog.at_level("INFO"):
        report = train(config(tmp_path, max_steps=1))
    assert report and report.peak_fraction <= 1 and report.peak_gflops == measured / 1e9
    said = "(above the 0.0 measured at start)" if measured == 1e3 else "of 1000000000.0 measured at start)"
    assert said in caplog.text

"""Checkpoints of a training that goes on: written in the background by all ranks, and models themselves."""

import errno
import importlib.machinery
import pathlib
import sys
import threading
import time
import types
from dataclasses import replace

import numpy as np
import pytest

from ckdist.errors import ConfigError, EngineError
from ckdist.train import checkpoint_writer
from ckdist.train.arena import Arena
from ckdist.train.callback import Callback
from ckdist.train.checkpoint_writer import CheckpointWriter
from ckdist.train.trainer import train
from ckdist.train.training_checkpoint import verify
from ckdist.weights.adapter_file import load_adapter
from ckdist.weights.checkpoint import open_checkpoint
from tests.support.curves import assert_same_tensors, curve, tensors
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config

TWO = {"per_device_train_batch_size": 3, "zero_stage": 1}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a training of two ranks."""
    c = config(tmp_path_factory.mktemp("two"), **TWO)
    curve(c, 2)
    return pathlib.Path(c.output_dir)


def assert_equal(found: pathlib.Path, expected: pathlib.Path) -> None:
    ours, theirs = tensors(found), tensors(expected)
    assert list(ours) == list(theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


def test_each_rank_writes_its_part_and_a_checkpoint_is_a_model(two, tmp_path):
    sizes = [(two / f"checkpoint-8/training/rank-{rank}.safetensors").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 1.1 * min(sizes)
    model, at_end = open_checkpoint(two / "model"), open_checkpoint(two / "checkpoint-8")
    assert at_end.spec == model.spec and (two / "checkpoint-8" / "tokenizer.json").is_file()
    for name in ("config.json", "model.safetensors"):
        assert (two / "checkpoint-8" / name).read_bytes() == (two / "model" / name).read_bytes()
    lora = config(tmp_path, model_config={}, model_name_or_path=str(two / "checkpoint-4"), lora_r=2, max_steps=1)
    train(lora)
    found = [load_adapter(tmp_path / "out" / name, model.spec).matrices for name in ("checkpoint-1", "adapter")]
    assert all(np.array_equal(found[0][name], array) for name, array in found[1].items())


def test_a_rank_that_does_not_see_the_folder_sends_its_part(two, tmp_path, monkeypatch):
    own = CheckpointWriter._with_others
    monkeypatch.setattr(
        CheckpointWriter, "_with_others", lambda self, parts, sees: own(self, parts, not self.world.rank)
    )
    c = config(tmp_path, **TWO)
    curve(c, 2)
    assert_equal(tmp_path / "out" / "checkpoint-8", two / "checkpoint-8")


def test_without_memory_for_a_copy_it_waits_and_says_so(two, tmp_path, monkeypatch, caplog):
    """Rank 0 has the whole weights in a file then."""
    monkeypatch.setattr(checkpoint_writer, "free_memory", lambda _: 0)
    files, in_file = [], Arena.in_file
    monkeypatch.setattr(Arena, "in_file", lambda *arguments: files.append(in_file(*arguments)) or files[-1])
    curve(config(tmp_path, tensor_parallel_size=2), 2)
    assert len(files) == 2 * 3, "the whole weights and a shard, for two checkpoints and the result"
    assert caplog.text.count("training waits while checkpoints are written") == 2  # once on each rank
    assert_same_tensors(tmp_path / "out" / "checkpoint-8", two / "checkpoint-8")


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(tmp_path, monkeypatch):
    write, go_on, began = checkpoint_writer.write_parts, threading.Event(), []

    def slow(*arguments):
        began.append(time.monotonic())
        assert go_on.wait(30)
        return write(*arguments)

    def on_step(report):
        if report.step == 7:
            assert len(began) == 1 and not (tmp_path / "out" / "checkpoint-4").exists()
            go_on.set()

    monkeypatch.setattr(checkpoint_writer, "write_parts", slow)
    c = config(tmp_path)
    train(c, on_step)
    assert len(began) == 2
    again = config(tmp_path, resume=str(tmp_path / "out" / "checkpoint-4"))
    expected = tensors(tmp_path / "out" / "checkpoint-8")
    train(again)
    for name, array in tensors(tmp_path / "out" / "checkpoint-8").items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def test_an_error_of_one_ranks_writer_ends_all_ranks(tmp_path, monkeypatch):
    write = checkpoint_writer.write_parts

    def full(folder, rank, parts):
        if rank == 1 and folder.name.startswith(".checkpoint-8"):
            raise OSError(errno.ENOSPC, "no space")
        return write(folder, rank, parts)

    monkeypatch.setattr(checkpoint_writer, "write_parts", full)
    c = config(tmp_path, **TWO)

    def body(world):
        with pytest.raises(EngineError, match="checkpoint-8 could not be written: the disk is full"):
            train(c, world=world)

    run_threads(2, body)
    assert sorted(path.name for path in (tmp_path / "out").glob("*checkpoint*")) == ["checkpoint-4"]
    monkeypatch.undo()
    reports = curve(replace(c, max_steps=8), 2)
    assert [report.step for report in reports] == [5, 6, 7, 8]


class Seen(Callback):
    def __init__(self):
        self.seen = []

    def on_step(self, report):
        self.seen.append(report.step)

    def on_checkpoint(self, path, step):
        assert verify(path).step == step
        self.seen.append(path.name)

    def on_end(self, report):
        self.seen.append(f"end of {report.step}")


def test_callbacks_and_trackers_on_all_ranks(tmp_path, monkeypatch):
    logged, run = [], types.SimpleNamespace()
    run.log = lambda values, step: logged.append((step, values["train/loss"]))
    run.finish = lambda: logged.append("finished")
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    wandb.init = lambda **fields: logged.append(fields["config"]["max_steps"]) or run
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    c, every = config(tmp_path, max_steps=4, save_steps=2, report_to=("wandb",), **TWO), [Seen(), Seen()]
    run_threads(2, lambda world: train(c, world=world, callbacks=[every[world.rank]]))
    for one in every:
        assert [item for item in one.seen if isinstance(item, int)] == [1, 2, 3, 4]
        assert one.seen.index("checkpoint-2") > one.seen.index(2) and one.seen[-2:] == ["checkpoint-4", "end of 4"]
    assert logged[0] == 4 and [item[0] for item in logged[1:-1]] == [1, 2, 3, 4] and logged[-1] == "finished"
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"report_to mlflow needs mlflow: pip install 'ckdist\[mlflow\]'"):
        train(replace(c, report_to=("mlflow",)))

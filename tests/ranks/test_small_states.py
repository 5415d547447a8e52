"""Adafactor and AdamW of 8 bits in a training: a stop changes no bit, and neither do ranks beyond rounding."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckdist.train.trainer import train
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config


@pytest.mark.parametrize("optim, dtype", [("adafactor", "float32"), ("adamw_8bit", "bfloat16")])
def test_a_stop_and_other_meshes_change_nothing(tmp_path, optim, dtype):
    def trained(name, ranks=1, stop=None, **fields):
        (tmp_path / name).mkdir(exist_ok=True)
        common = {"optim": optim, "weights_dtype": dtype, "max_steps": 4, "save_steps": 2, "save_dtype": "float32"}
        c, reports = config(tmp_path / name, **common, **fields), []

        def one(world):
            return train(c, reports.append if world.rank == 0 else None, world=world, should_stop=stop)

        run_threads(ranks, one)
        return [report.loss for report in reports], Path(c.output_dir)

    losses, whole = trained("whole")
    first, _ = trained("half", stop=iter([False, True]).__next__)
    rest, half = trained("half")
    assert first + rest == losses and losses[-1] < losses[0]
    files = [folder / "model" / "model.safetensors" for folder in (half, whole)]
    assert files[0].read_bytes() == files[1].read_bytes()
    np.testing.assert_allclose(trained("dp2", 2, per_device_train_batch_size=3)[0], losses, rtol=1e-4)
    stages, folder = trained("pp2", 2, pipeline_parallel_size=2)
    np.testing.assert_allclose(stages, losses, rtol=1e-4)
    last = replace(config(tmp_path / "pp2", optim=optim, weights_dtype=dtype), max_steps=5)
    again = []
    train(last, again.append)  # one rank goes on with the state of two stages
    assert again[0].step == 5 and folder.exists()

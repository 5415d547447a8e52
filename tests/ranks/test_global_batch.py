"""A global batch size keeps the steps of a training, however many ranks there are."""

import numpy as np
import pytest

from ckdist.errors import ConfigError
from ckdist.launcher.job import FULL_RANKS_VARIABLE
from ckdist.mesh import Mesh
from ckdist.train.ranks import full_replicas
from ckdist.train.trainer import train
from tests.support.thread_ranks import run_threads
from tests.support.tiny_training import config


def curve(folder, ranks, **fields):
    folder.mkdir(exist_ok=True)
    c, reports = config(folder, global_batch_size=6, max_steps=4, save_steps=2, **fields), []
    run_threads(ranks, lambda world: train(c, reports.append if world.rank == 0 else None, world=world))
    return reports


def test_steps_have_the_same_rows_on_any_ranks(tmp_path):
    whole = curve(tmp_path / "one", 1, per_device_train_batch_size=4)  # in batches of 3 and 3 rows
    losses, tokens = [report.loss for report in whole], [report.tokens for report in whole]
    stages = {"pipeline_parallel_size": 2, "per_device_train_batch_size": 2}
    meshes = ("two", 2, {}), ("three", 3, {"per_device_train_batch_size": 1}), ("stages", 2, stages)
    for name, ranks, fields in meshes:
        reports = curve(tmp_path / name, ranks, **fields)
        np.testing.assert_allclose([report.loss for report in reports], losses, rtol=1e-5, err_msg=name)
        assert [report.tokens for report in reports] == tokens
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps \(2\) must be 1 with global_batch_size 6"):
        config(tmp_path, global_batch_size=6, gradient_accumulation_steps=2)


@pytest.mark.parametrize("began, ranks, axes, replicas", [(4, 3, {}, 4), (8, 6, {"tp": 2}, 4), (8, 4, {"sp": 2}, 4)])
def test_a_job_that_lost_ranks_knows_its_first_replicas(monkeypatch, began, ranks, axes, replicas):
    monkeypatch.setenv(FULL_RANKS_VARIABLE, str(began))
    assert full_replicas(Mesh.of_job(ranks, 0, **axes)) == replicas

"""Muon, Adafactor and AdamW with 8-bit moments over replicas and tensors: the bits of one rank."""

import functools

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.mesh import Mesh
from ckdist.program.pool import ThreadPool
from ckdist.train.arena import WIDE, Arena, assign
from ckdist.train.config import TrainConfig
from ckdist.train.loss_program import lower_model
from ckdist.train.moments import state_floats
from ckdist.train.optimizer import STATES, Optimizer
from ckdist.train.ranks import TrainingRanks
from tests.support.specs import spec as small_spec
from tests.support.thread_ranks import run_threads

SPEC = small_spec(heads=6, kv_heads=3, head_dim=8, ffn=100, vocab=77)
STEPS, TOKENS = 2, 16


@functools.cache
def shards_of(dp: int, tp: int, rank: int):
    return lower_model(SPEC, 16, mesh=Mesh.of_job(dp * tp, rank, dp=dp, tp=tp)).trained_shards


@functools.cache
def numbers(name: str, step: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([step, *name.encode()]).standard_normal(shape, np.float32)


def updated(optim: str, dp: int, tp: int, zero: int, world=None, dtype=WIDE):
    """The whole parameters' shards after some updates, and the names that this rank keeps."""
    mesh = Mesh.of_job(dp * tp, world.rank if world else 0, dp=dp, tp=tp)
    communicator = open_communicator(world, timeout=20) if world else None
    shards = shards_of(dp, tp, mesh.rank)
    parameters, gradients = Arena(shards.shapes, dtype=dtype), Arena(shards.shapes)
    normal = lambda name, step: numbers(name, step, tuple(shards.whole_shapes[name]))
    for name in parameters:
        assign(parameters[name], shards.part(name, normal(name, STEPS)))
    # Without clipping, no sum over ranks has an influence.
    more = {"output_dir": "out", "train_file": "text", "model_name_or_path": "m", "weight_decay": 0.1}
    config = TrainConfig(optim=optim, zero_stage=zero, max_grad_norm=0.0, **more)
    ranks = TrainingRanks.split(mesh, communicator)
    optimizer = Optimizer(config, parameters, gradients, ranks, ThreadPool(1), shards)
    for step in range(STEPS):
        for name in gradients:
            is_own = mesh.index("dp") == 0 or not zero  # else gradients are sums over replicas already
            gradients[name][...] = TOKENS * shards.part(name, normal(name, step)) if is_own else 0
        assert not optimizer.step(1e-2, TOKENS).skipped
    return shards, parameters, optimizer


@pytest.mark.parametrize("optim", ["muon", "adafactor", "adamw_8bit"])
def test_updates_of_any_mesh_are_those_of_one_rank(optim):
    _, expected, alone = updated(optim, 1, 1, 0)
    assert sum(flat.size for flat in alone.state.values()) == state_floats(optim, STATES[optim], expected.shapes)
    for dp, tp, zero in ((1, 2, 0), (1, 3, 0), (3, 1, 1), (2, 2, 1), (2, 2, 0)):
        found = run_threads(dp * tp, lambda world, mesh=(dp, tp, zero): updated(optim, *mesh, world))
        for shards, parameters, optimizer in found:
            for name, view in parameters.items():
                np.testing.assert_array_equal(view, shards.part(name, expected[name]), err_msg=f"{dp} {tp} {name}")
            assert optimizer.whole is not None
        kept = [name for *_, optimizer in found for name in optimizer.whole.shapes]
        copies = dp if not zero and optim != "muon" else 1
        assert sorted(kept) == sorted(copies * list(expected)), "each state is kept once"

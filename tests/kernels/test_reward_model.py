"""A reward model beside TRL's: losses, norms, rewards and weights over steps, on one and two ranks."""

import functools

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.mesh import Mesh
from ckdist.models.decoder import SCORE
from ckdist.program.training_tracer import TrainingTracer
from ckdist.train.config import TrainConfig
from ckdist.train.data.preference_rows import PreferenceBatch
from ckdist.train.optimizer import Optimizer
from ckdist.train.ranks import TrainingRanks
from ckdist.train.reward_step import RewardStep
from tests.support.golden_training import model
from tests.support.paths import GOLDEN
from tests.support.thread_ranks import run_threads
from tests.support.training_executable import executable


def batch_of(ids: np.ndarray) -> PreferenceBatch:
    sequences = [own[own >= 0] for own in ids]
    starts = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
    targets = np.full(starts[-1], -1, np.int32)
    targets[starts[1:] - 1] = 0
    units = np.arange(len(ids) // 2)
    more = {"answers": targets == 0, "desirable": units >= 0}
    return PreferenceBatch(np.concatenate(sequences).astype(np.int32), targets, starts, units=units, **more)


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_trls(ranks):
    with np.load(GOLDEN / "reward.npz") as stored:
        golden = dict(stored)
    spec, weights = model("llama3")
    first = np.stack([golden["score"], np.zeros_like(golden["score"])])
    config = TrainConfig(
        output_dir="o",
        train_file=("a",),
        model_name_or_path="m",
        method="reward",
        learning_rate=5e-4,
        max_grad_norm=0.0,
    )

    def run(world):
        communicator = open_communicator(world, timeout=20) if ranks > 1 else None
        made = executable(
            spec, 128, lambda name: first if name == SCORE else weights[name], communicator=communicator,
            tracer=functools.partial(TrainingTracer, labels=2),
        )  # fmt: skip
        group = TrainingRanks.split(Mesh.of_job(ranks, world.rank if world else 0), communicator)
        step, optimizer = RewardStep(made, group), Optimizer(config, made.parameters, made.gradients, group)
        found = []
        for ids in golden["ids"]:
            pairs = ids.reshape(-1, 2, ids.shape[1])
            own = np.array_split(pairs, ranks)[world.rank if world else 0].reshape(-1, ids.shape[1])
            batch = batch_of(own)
            rewards = step.rewards(batch)
            sums = step.forward_backward([batch], None)
            loss, units = group.sum_replicas(sums.loss, sums.units)
            found.append((loss / units, optimizer.step(5e-4, units).grad_norm, rewards, sums.metrics))
        return found, {name: view.copy() for name, view in made.parameters.items()}

    results = run_threads(ranks, run) if ranks > 1 else [run(None)]
    for rank, (found, after) in enumerate(results):
        for at, (loss, norm, rewards, metrics) in enumerate(found):
            assert loss == pytest.approx(golden["losses"][at], rel=2e-5)
            assert norm == pytest.approx(golden["norms"][at], rel=1e-4)
            pairs = golden["rewards"][at].reshape(-1, 2)
            np.testing.assert_allclose(rewards, np.array_split(pairs, ranks)[rank], rtol=1e-4, atol=2e-4)
            assert metrics["accuracy"] == pytest.approx((pairs[:, 0] > pairs[:, 1]).mean())
        np.testing.assert_allclose(after[SCORE][0], golden["score_after"], atol=2e-5)
        np.testing.assert_allclose(after["model.embed_tokens.weight"][:10], golden["embeddings_after"], atol=2e-5)
        assert not after[SCORE][1].any()

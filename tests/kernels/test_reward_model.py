"""A reward model beside TRL's: losses, norms, rewards and weights over steps, on one and two ranks."""

import contextlib
import functools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.sampler import Sampler
from ckdist.errors import ModelFileError
from ckdist.mesh import Mesh
from ckdist.models.decoder import SCORE
from ckdist.program.training_tracer import TrainingTracer
from ckdist.train.config import TrainConfig
from ckdist.train.data.preference_rows import PreferenceBatch
from ckdist.train.optimizer import Optimizer
from ckdist.train.ranks import TrainingRanks
from ckdist.train.reward_step import RewardStep
from ckdist.weights.adapter import Adapter
from ckdist.weights.adapter_file import MODULES, Lora
from ckdist.weights.adapter_slots import AdapterSlots
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.merged_weights import MergedWeights
from ckdist.weights.stored_pooling import stored_pooling
from ckdist.weights.stored_ranking import stored_ranking
from tests.support.golden_training import model
from tests.support.paths import GOLDEN
from tests.support.thread_ranks import run_threads
from tests.support.training_executable import executable

TRACER = functools.partial(TrainingTracer, labels=2)


def batch_of(ids: np.ndarray) -> PreferenceBatch:
    sequences = [own[own >= 0] for own in ids]
    starts = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
    targets = np.full(starts[-1], -1, np.int32)
    targets[starts[1:] - 1] = 0
    units = np.arange(len(ids) // 2)
    more = {"answers": targets == 0, "desirable": units >= 0}
    return PreferenceBatch(np.concatenate(sequences).astype(np.int32), targets, starts, units=units, **more)


@pytest.mark.parametrize("name, ranks", [("reward", 1), ("reward", 2), ("reward_lora", 1)])
def test_steps_are_trls(name, ranks):
    with np.load(GOLDEN / f"{name}.npz") as stored:
        golden = dict(stored)
    more = {}
    start = {key.removeprefix("start."): value for key, value in golden.items() if key.startswith("start.")}
    if start:
        lora = Lora(2, 4, MODULES[:7])
        more = {"trained": [SCORE, *start], "tracer": functools.partial(TRACER, low_rank=lora.low_rank())}
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
            spec, 128, ({**weights, **start, SCORE: first}).__getitem__, communicator=communicator,
            **{"tracer": TRACER, **more},
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
        if not start:
            np.testing.assert_allclose(after["model.embed_tokens.weight"][:10], golden["embeddings_after"], atol=2e-5)
        assert not after[SCORE][1].any()


def test_peft_s_adapter_scores_and_is_refused_elsewhere(tmp_path):
    folder, base = GOLDEN / "reward_adapter", open_checkpoint(GOLDEN / "llama3")
    exact = {"cache_type_k": "f32", "cache_type_v": "f32", "threads": 1, "ctx_size": 64}
    config = EngineConfig(model=str(base.path), lora=(str(folder),), **exact)
    loaded = load_model(config, SingleWorld(), embeddings=True)
    with contextlib.closing(loaded), np.load(GOLDEN / "reward_lora.npz") as golden:
        assert stored_pooling(loaded.checkpoint) == "rank"
        engine = Engine(loaded.executable, Sampler(base.spec.vocab_size))
        engine.ranking = stored_ranking(loaded.checkpoint, SimpleNamespace(templates={}))
        for at, ids in enumerate(golden["ids"][0]):
            engine.embed(at, ids[ids >= 0].tolist(), "rank")
        scores = {}
        while engine.has_work:
            scores |= {output.id: output.embedding.item() for output in engine.step()}
        np.testing.assert_allclose([scores[at] for at in range(len(scores))], golden["after"], atol=2e-4)
    with pytest.raises(ModelFileError, match="is a reward model, whose head has no place in the result"):
        MergedWeights(base, folder)
    with pytest.raises(ModelFileError, match="is a reward model, which scores all requests: start with --lora"):
        AdapterSlots(base.spec, 1, 8).load(0, folder)
    shutil.copytree(folder, tmp_path / "headless")
    config = json.loads((folder / "adapter_config.json").read_text())
    for fields, message in (({"modules_to_save": ["lm_head"]}, "whole modules were trained"), ({"r": 3}, "r is 3")):
        (tmp_path / "headless/adapter_config.json").write_text(json.dumps(config | fields))
        with pytest.raises(ModelFileError, match=message):
            Adapter(tmp_path / "headless", base.spec)

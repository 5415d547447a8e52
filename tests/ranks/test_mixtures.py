"""Families with experts on several hosts, each of which has whole experts: the logits of one rank, and prefixes."""

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from tests.support.paths import GOLDEN
from tests.support.situations import answers, driven
from tests.support.thread_ranks import run_threads


def load(family: str, world, **more):
    config = EngineConfig(
        model=str(GOLDEN / family), cache_type_k="f32", cache_type_v="f32", threads=1, ctx_size=128, **more
    )
    return load_model(config, world)


# Routers by sigmoid, groups and a bias; by softmax and a bias; with latent attention; stacks of gate and up.
@pytest.mark.parametrize("family", ["bailing_moe_v2", "ernie4_5_moe", "mistral4", "granitemoe"])
def test_hosts_with_whole_experts_have_the_golden_logits(family):
    ids, golden = (np.load(GOLDEN / family / f"{name}.npy") for name in ("ids", "logits"))

    def rank(world):
        model = load(family, world, experts="expert", transport="tcp", ubatch_size=48)
        logits = driven(world, model.executable, lambda executable: SingleSequence(executable).feed(ids).copy())
        model.executable.close()
        return logits

    difference = run_threads(["one", "two", "two"], rank)[0] - golden
    assert np.abs(difference).max() < 2e-5 * max(1.0, np.abs(golden).max())


# Norms of rotated keys, queries scaled by position, positions with three axes, windows beside layers without rotation.
@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "mistral4", "qwen3vlmoe", "ministral3", "exaone4"])
def test_a_reused_prefix_has_the_same_bits(family):
    model = load(family, SingleWorld(), ubatch_size=24, parallel=2)
    shared = np.load(GOLDEN / family / "ids.npy").tolist()[:40]
    requests = [([*shared, token], 8) for token in (5, 9, 11)]
    together, engine = answers(model.executable, requests, True)
    assert engine.stats()["cached_tokens_total"] > 0
    assert together == [answers(model.executable, [request], False)[0][0] for request in requests]
    model.close()

"""As many stages as ranks, whose rows go over every transport: the bits of one rank."""

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.sampler import Sampler
from tests.support.paths import GOLDEN
from tests.support.situations import situations, texts

MOST = 3  # layers that the models have at least


def served(world, path, stages: int, transport: str):
    """Logits and texts on rank 0, None on others."""
    config = EngineConfig(
        model=str(path), pipeline_parallel_size=stages, transport=transport, threads=1, ubatch_size=32, ctx_size=96,
        comm_timeout=20.0, cache_type_k="f32",
    )  # fmt: skip
    model = load_model(config, world)
    try:
        if world.rank:
            return model.executable.work()
        logits = situations(model.executable)
        return logits, texts(Engine(model.executable, Sampler(model.spec.vocab_size)))[0]
    finally:
        model.close()


@pytest.mark.parametrize("name", ["gemma3", "qwen3moe"])
def test_bits_over_every_transport(world, transports, name):
    if not 1 < world.size <= MOST:
        pytest.skip(f"two or {MOST} ranks are stages")
    expected = served(SingleWorld(), GOLDEN / name, 1, "auto") if world.rank == 0 else None
    for transport in transports:
        found = served(world, GOLDEN / name, world.size, transport)
        if world.rank == 0:
            (logits, words), (expected_logits, expected_words) = found, expected
            assert words == expected_words
            for a, b in zip(logits, expected_logits, strict=True):
                assert np.array_equal(a, b), f"{name} over {transport}"

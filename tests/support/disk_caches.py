"""Engines with a cache on disk: small models whose loads always win, and the answers of some conversations."""

import numpy as np

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine import disk_tier
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from tests.support.paths import GOLDEN


def load(model: str, folder=None, world=None, **fields):
    """A golden model on one thread, with a cache on disk if there is a folder, whose loads are always worth it."""
    more = {"threads": 1, "ctx_size": 320, "parallel": 4, "ubatch_size": 64, "comm_timeout": 60.0, **fields}
    config = EngineConfig(model=str(GOLDEN / model), cache_disk=None if folder is None else str(folder), **more)
    loaded = load_model(config, world or SingleWorld())
    if loaded.disk is not None:
        loaded.disk.token_seconds = 1.0
        disk_tier.MEASURED_TOKENS = 1 << 30  # it stays
    return loaded


def engine_of(loaded, **more) -> Engine:
    """An engine over a loaded model."""
    return Engine(loaded.executable, Sampler(loaded.executable.vocab_size), disk=loaded.disk, **more)


def prompts() -> list[list[int]]:
    """Two branches of one conversation, and another one."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, 180, 150).tolist()
    return [[*common, 7, 8, 9], [*common[:100], *rng.integers(3, 180, 60).tolist()], rng.integers(3, 180, 97).tolist()]


def answers(engine: Engine, asked, tenant: bytes = b"", tokens: int = 6) -> list:
    """Of each prompt its tokens with their log probabilities, all asked at once."""
    found: dict = {}
    params = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=2, ignore_eos=True)
    for id, prompt in enumerate(asked):
        engine.add(id, prompt, params, tenant)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            found.setdefault(output.id, []).extend(
                [token, *entry] for token, entry in zip(output.tokens, output.logprobs or [], strict=True)
            )
    return [found[id] for id in range(len(asked))]


def ask(model: str, folder=None, asked=None, tenant: bytes = b"", **fields):
    """The answers of one job, and its engine's counters at the end."""
    loaded = load(model, folder, **fields)
    try:
        engine = engine_of(loaded, prefix_reuse=folder is not None)
        found = [answers(engine, [prompt], tenant)[0] for prompt in (prompts() if asked is None else asked)]
        engine.finish_storing()
        return found, engine.stats()
    finally:
        loaded.close()

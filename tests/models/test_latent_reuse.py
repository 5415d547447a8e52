"""Latent attention, and caches of few bits: reuse, chunks and preemption do not change the bits of answers."""

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from tests.support.paths import GOLDEN
from tests.support.situations import answers

CROWDED = {  # bytes of cache for one sequence of 336 tokens and some of another
    ("deepseek_v2", "f32"): 300 << 10,
    ("deepseek_v3", "i16"): 120 << 10,
    ("deepseek_v3", "q8_0"): 64 << 10,
    ("qwen3", "q4_0"): 64 << 10,
    ("gemma2", "q8_0"): 96 << 10,
}


def load(model: str, cache: str, threads: int, ubatch: int, kv_memory: int):
    """A golden model with so much cache."""
    config = EngineConfig(
        model=str(GOLDEN / model), cache_type_k=cache, cache_type_v=cache, threads=threads, ubatch_size=ubatch,
        ctx_size=336, parallel=8, kv_memory=kv_memory,
    )  # fmt: skip
    return load_model(config, SingleWorld())


@pytest.fixture(scope="module", params=CROWDED, ids="-".join)
def models(request):
    """One that reuses, preempts and computes prompts in chunks of 24; and one that has room for each, at once,
    and one thread.
    """
    crowded, roomy = load(*request.param, 2, 24, CROWDED[request.param]), load(*request.param, 1, 336, 4 << 20)
    yield crowded.executable, roomy.executable
    crowded.close()
    roomy.close()


def test_the_same_bits_as_alone_anew_and_at_once(models):
    crowded, roomy = models
    rng = np.random.default_rng(0)
    common, requests = rng.integers(3, 200, 250).tolist(), []
    for _ in range(10):
        kept = int(rng.integers(100, 250))
        requests.append(([*common[:kept], *rng.integers(3, 200, int(rng.integers(1, 20))).tolist()], 40))
    together, engine = answers(crowded, requests, True)
    assert engine.scheduler.preemptions > 0 and engine.stats()["cached_tokens_total"] > 0
    assert max(len(prompt) for prompt, _ in requests) > 2 * crowded.max_tokens
    for request, answer in zip(requests, together, strict=True):
        found, alone = answers(roomy, [request], False)
        assert alone.scheduler.preemptions == alone.stats()["cached_tokens_total"] == 0
        assert found == [answer]

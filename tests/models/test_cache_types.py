"""Keys and values of unequal cache types, end to end: logits stay near those of a float32 cache, as near as the types
allow.
"""

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from tests.support.paths import GOLDEN
from tests.support.thread_ranks import run_threads

PAIRS = [("i16", "q8_0"), ("q8_0", "i16"), ("f16", "q8_0"), ("q8_0", "f16"), ("f32", "i16"), ("bf16", "f16")]
PAIRS += [("q8_0", "q4_0"), ("q4_0", "i16"), ("f16", "q4_0")]


def logits(world, folder, key_type, value_type, threads=1) -> np.ndarray | None:
    """(tokens, vocab) of a prompt in chunks and of single tokens behind it, on rank 0."""
    config = EngineConfig(
        model=str(folder), cache_type_k=key_type, cache_type_v=value_type, threads=threads, ubatch_size=24, ctx_size=128
    )
    model, found = load_model(config, world), None
    if world.rank == 0:
        assert (model.plan.cache.key_type, model.plan.cache.value_type) == (key_type, value_type)
        sequence, ids = SingleSequence(model.executable), np.load(folder / "ids.npy")
        found = np.concatenate([sequence.feed(ids[:60]), *(sequence.feed([token]).copy() for token in ids[60:])])
    else:
        model.executable.work()
    model.close()
    return found


def divergence(logits, other) -> float:
    """The largest over the tokens."""
    p, q = (row - row.max(-1, keepdims=True) for row in (other.astype(float), logits.astype(float)))
    p, q = (row - np.log(np.exp(row).sum(-1, keepdims=True)) for row in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).max())


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "olmo3"])
def test_unequal_types_stay_near_a_float32_cache(family):
    """The divergence is of the order of that of the coarser type for both: neither is read as the other."""
    of = lambda key_type, value_type: divergence(logits(SingleWorld(), GOLDEN / family, key_type, value_type), exact)
    exact = logits(SingleWorld(), GOLDEN / family, "f32", "f32")
    alike = {kind: of(kind, kind) for kind in ("f32", "f16", "bf16", "i16", "q8_0", "q4_0")}
    assert alike["q4_0"] < 0.7 and alike["q8_0"] < 5e-3 and alike["i16"] < 1e-6
    for key_type, value_type in PAIRS:
        found = of(key_type, value_type)
        assert 0 < found < 2 * max(alike[key_type], alike[value_type]), f"{key_type} keys and {value_type} values"


def test_an_index_of_integers_chooses_the_blocks_of_a_float32_one():
    exact, found = (logits(SingleWorld(), GOLDEN / "minimax_m3", kind, kind, 2) for kind in ("f32", "i16"))
    assert np.abs(exact - found).max() < 0.01


@pytest.mark.parametrize("ranks, types, near", [(2, ("i16", "q8_0"), 1e-4), (3, ("q4_0", "q4_0"), 1e-1)])
def test_ranks_have_the_result_of_one(ranks, types, near):
    """Sums of ranks round differently, which can move a code of a later layer to its neighbour."""
    several = run_threads(ranks, lambda world: logits(world, GOLDEN / "qwen2", *types))[0]
    assert divergence(several, logits(SingleWorld(), GOLDEN / "qwen2", *types)) < near


def test_many_threads_have_the_bits_of_one():
    """They divide a prompt into smaller tiles of queries."""
    one, many = (logits(SingleWorld(), GOLDEN / "mistral", "q4_0", "q8_0", threads) for threads in (1, 6))
    np.testing.assert_array_equal(one, many)

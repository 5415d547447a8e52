"""Models whose layers keep states: whatever is reused, cut into chunks or preempted, answers have the same bits."""

import numpy as np
import pytest

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import CapacityError, NativeError
from ckdist.program.step_batch import Batch
from tests.support.paths import GOLDEN
from tests.support.situations import answers

END = 2  # a token that ends a turn
BLOCK_BYTES = 4096  # of the golden model: one layer with two kv-heads of 16, in float32


@pytest.fixture(scope="module", params=[1, 2], ids="threads={}".format)
def loaded(request):
    """A golden model with room for 16 blocks, which four sequences of up to 150 tokens fight for."""
    config = EngineConfig(
        model=str(GOLDEN / "qwen35"), cache_type_k="f32", cache_type_v="f32", threads=request.param, ubatch_size=24,
        ctx_size=160, parallel=4, kv_memory=16 * BLOCK_BYTES,
    )  # fmt: skip
    model = load_model(config, SingleWorld())
    yield model
    model.close()


@pytest.fixture
def other(request):
    """Another golden model with little room: its name, and the bytes of its blocks."""
    name, block_bytes = request.param
    config = EngineConfig(
        model=str(GOLDEN / name), cache_type_k="f32", cache_type_v="f32", threads=1, ubatch_size=24, ctx_size=160,
        parallel=4, kv_memory=16 * block_bytes,
    )  # fmt: skip
    model = load_model(config, SingleWorld())
    model.executable.num_blocks = min(model.executable.num_blocks, 16)  # the least memory has more of DeepSeek-V4
    yield model
    model.close()


@pytest.mark.parametrize(
    "other",
    [
        *(("granite4h", 5120), ("falcon_h1", 2 * 5120), ("lfm2", 2 * 5120), ("jamba", 2 * 3072)),
        *(("deepseek_v4", 4096), ("qwen4_exp", 4608)),
    ],
    ids=lambda one: one[0],
    indirect=True,
)
def test_states_of_other_kinds_have_the_same_bits_as_alone(other):
    rng = np.random.default_rng(1)
    common = rng.integers(3, 80, 90).tolist()
    requests = [([*common[:kept], *rng.integers(3, 80, 9).tolist()], 40) for kept in rng.integers(0, 90, 8).tolist()]
    together, engine = answers(other.executable, requests, True, [END])
    assert engine.scheduler.preemptions > 0 and engine.stats()["cached_tokens_total"] > 0
    for request, answer in zip(requests, together, strict=True):
        assert answers(other.executable, [request], False)[0] == [answer]


@pytest.mark.parametrize("seed", range(2))
def test_the_same_bits_as_alone_and_anew(loaded, seed):
    rng = np.random.default_rng(seed)
    common, requests = rng.integers(3, 240, 90).tolist(), []
    common[66] = END
    for _ in range(10):
        kept = int(rng.integers(0, 90))
        requests.append(([*common[:kept], *rng.integers(3, 240, int(rng.integers(1, 20))).tolist()], 40))
    together, engine = answers(loaded.executable, requests, True, [END])
    assert engine.scheduler.preemptions > 0 and engine.stats()["cached_tokens_total"] > 0
    for request, answer in zip(requests, together, strict=True):
        assert answers(loaded.executable, [request], False)[0] == [answer]


def test_a_state_is_never_gone_on_from_elsewhere(loaded):
    executable = loaded.executable
    SingleSequence(executable).feed(np.arange(20), "none")
    blocks = np.arange(3, dtype=np.int32)
    chunk = lambda first: np.array([[4, first, 3]], np.int32)
    run = lambda first, slots: executable.run(
        Batch(np.arange(4, dtype=np.int32), chunk(first), blocks, np.zeros(0, np.int32), np.array([slots], np.int32))
    )
    for first, slots, said in (
        (24, (0, 0, -1, 0), "slot 0, which holds 20 tokens"),
        (20, (1, 0, -1, 0), "slot 1, which holds"),
        (20, (-1, 0, -1, 0), "slot -1, which holds 0 tokens"),
        (20, (0, 999, -1, 0), "slot 999 is not one of"),
        (20, (0, 0, 0, 32), "two sequences of a batch write state slot 0"),
        (20, (0, 0, 1, 25), "saved at position 25"),
    ):
        with pytest.raises(NativeError, match=said):
            run(first, slots)
    run(20, (0, 0, -1, 0))


def test_states_that_do_not_fit_are_refused_with_the_sum(monkeypatch):
    monkeypatch.setattr("ckdist.layouts.rank_plan.free_memory", lambda *_: 1 << 20)
    config = EngineConfig(model=str(GOLDEN / "qwen35"), threads=1, parallel=200)
    with pytest.raises(CapacityError, match=r"the states of --parallel 200 sequences and a snapshot need .*would fit"):
        load_model(config, SingleWorld())

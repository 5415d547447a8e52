"""Loads from disk beside running steps: who waits for them, and for how long."""

import numpy as np
import pytest

from ckdist.engine.sampling_params import SamplingParams
from tests.support.disk_caches import answers, ask, engine_of, load, prompts

MODEL = "llama3"
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


class SlowDisk:
    """Copies seem not to end until `is_open`."""

    def __init__(self, worker) -> None:
        self.is_open, self._results = False, worker.copy_results
        worker.copy_results = self

    def __call__(self) -> np.ndarray:
        found = self._results()
        if not self.is_open:
            found["ended"] = 0
        return found


@pytest.fixture
def slow(tmp_path):
    """An engine over a cache on disk, and its disk."""
    ask(MODEL, tmp_path)
    loaded = load(MODEL, tmp_path)
    yield engine_of(loaded), SlowDisk(loaded.executable.worker)
    loaded.close()


def steps(engine, count: int) -> dict:
    """The tokens of some steps, by request."""
    found: dict = {}
    for _ in range(count):
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.tokens)
    return found


def test_others_pass_a_sequence_that_loads(slow):
    engine, disk = slow
    engine.add("loads", prompts()[0], SHORT)
    engine.add("other", [5, 6, 7], SHORT)
    found = steps(engine, 12)
    assert list(found) == ["other"] and len(found["other"]) == 4
    assert engine.stats()["disk_requests_loading"] == engine.stats()["requests_waiting"] == 1
    disk.is_open = True
    found = steps(engine, 40)
    assert len(found["loads"]) == 4 and not engine.has_work and engine.stats()["disk_loaded_tokens_total"] == 144


def test_streams_of_a_lost_engine_wait_for_the_loads_of_each_other(slow):
    engine, disk = slow
    engine.add("loads", prompts()[0][:-2], SHORT, drawn=prompts()[0][-2:])
    assert not steps(engine, 1)
    engine.add("other", [5, 6, 7], SHORT, drawn=[8])
    assert not steps(engine, 3)
    disk.is_open = True
    first = next(found for _ in range(100) if (found := steps(engine, 1)))
    assert first.keys() == {"loads", "other"}


def test_clients_with_one_prompt_load_it_once(slow):
    engine, disk = slow
    for id in range(4):
        engine.add(id, [*prompts()[0][:150], id], SHORT)
    steps(engine, 3)
    assert engine.stats()["disk_requests_loading"] == 4
    disk.is_open = True
    assert len(steps(engine, 60)) == 4 and engine.stats()["disk_loads_total"] == 1
    assert engine.stats()["disk_loaded_bytes_total"] == 9 * (8192 + 256)


def test_a_queue_of_thousands_waits_for_one_load(tmp_path):
    ask(MODEL, tmp_path)
    loaded = load(MODEL, tmp_path)
    engine, disk = engine_of(loaded, max_waiting=3000), SlowDisk(loaded.executable.worker)
    for id in range(2500):
        engine.add(id, prompts()[0], SHORT)
    steps(engine, 2)
    assert engine.stats()["disk_requests_loading"] > 0 and engine.stats()["requests_waiting"] == 2500
    disk.is_open = True
    steps(engine, 5)
    for id in engine.ids:
        engine.abort(id)
    assert engine.stats()["disk_loads_total"] == 1
    loaded.close()


def test_a_client_that_leaves_during_its_load_leaves_nothing_behind(slow):
    engine, disk = slow
    engine.add("gone", prompts()[0], SHORT)
    steps(engine, 2)
    assert engine.abort("gone") is not None and not engine.has_work
    disk.is_open = True
    engine.finish_storing()
    assert engine.pool.available == engine.pool.num_blocks and engine.pool.cached == 9
    assert not engine.is_storing


def test_a_prompt_longer_than_its_stored_part_computes_the_rest_and_says_why(slow):
    engine, disk = slow
    disk.is_open = True
    for prompt, end in ((prompts()[0], "whole prompt"), ([*prompts()[2][:50], *range(3, 60)], "new tokens")):
        engine.add(end, prompt, SHORT)
        uses = [output.cache_use for _ in range(60) for output in engine.step() if output.cache_use is not None]
        (use,) = uses
        assert use.end == end and use.matched == 0 and use.loaded == (144 if end == "whole prompt" else 48)
        assert use.loaded_bytes == use.loaded // 16 * (8192 + 256) and use.load_seconds > 0


def test_a_pool_without_room_computes(tmp_path):
    ask(MODEL, tmp_path)
    loaded = load(MODEL, tmp_path, kv_memory=14 * 6912, ctx_size=200)
    try:
        engine, alone = engine_of(loaded), ask(MODEL)[0]
        for _ in range(3):
            assert answers(engine, prompts()) == alone
    finally:
        loaded.close()


def test_a_state_comes_with_the_deepest_block_that_has_one(tmp_path):
    model, rng = "qwen35", np.random.default_rng(5)
    first = rng.integers(3, 180, 100).tolist()
    (answer,), _ = ask(model, tmp_path, [first], parallel=2)
    second = [*first, *(token for token, *_ in answer), *rng.integers(3, 180, 20).tolist()]
    found, stats = ask(model, tmp_path, [second], parallel=2)
    assert found == ask(model, asked=[second], parallel=2)[0]
    assert stats["disk_loaded_tokens_total"] == 96 and stats["disk_states"] >= 2

"""Conversations beyond memory and disk, over restarts and with clients that leave: answers as of a client alone."""

import numpy as np
import pytest

from ckdist.engine.sampling_params import SamplingParams
from tests.support.disk_caches import answers, engine_of, load

LEAVES = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    "model, memory, disk",
    [("llama3", 40 * 6912, "500K"), ("deepseek_v3", 60 * 4000, "600K"), ("qwen35", 60 * 2200, "1M")],
)
def test_answers_are_those_of_a_client_alone(model, memory, disk, tmp_path):
    rng, asked, loads, evictions = np.random.default_rng(1), [], 0, 0
    talks = [rng.integers(3, 180, 60).tolist() for _ in range(8)]
    for _ in range(3):
        loaded = load(model, f"{tmp_path}:{disk}", kv_memory=memory, ubatch_size=48)
        engine = engine_of(loaded)
        for _ in range(8):
            prompts = [talk + rng.integers(3, 180, int(rng.integers(1, 40))).tolist() for talk in talks]
            for id, prompt in enumerate(prompts[:3]):
                engine.add(("leaves", id), [*prompt, 4, 5], LEAVES)
                engine.step()
            for id in range(3):
                engine.abort(("leaves", id))
            asked += zip(prompts, answers(engine, prompts, tokens=3), strict=True)
            talks = [prompt if len(prompt) < 220 else prompt[:60] for prompt in prompts]
        engine.finish_storing()
        loads += engine.stats()["disk_loads_total"]
        evictions += engine.stats()["disk_evicted_total"]
        assert engine.pool.available == engine.pool.num_blocks, "every holder has gone"
        assert engine.states is None or engine.states.available == engine.states.num_slots
        loaded.close()
    assert loads > 0 and evictions > 0
    loaded = load(model)
    engine = engine_of(loaded, prefix_reuse=False)
    for prompt, found in asked[::7]:
        assert answers(engine, [prompt], tokens=3) == [found]
    loaded.close()

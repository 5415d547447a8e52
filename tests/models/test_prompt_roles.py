"""Prompts' tokens and generated tokens in steps of their own, as where prompts have other products."""

import numpy as np
import pytest

from ckdist import native
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine import load_model as loading
from ckdist.engine.engine import Engine
from ckdist.engine.sampler import Sampler
from ckdist.engine.sampling_params import SamplingParams
from tests.support.paths import GOLDEN


def logits_of(model, prompts, **fields):
    """The bytes of the logits that choose each token, by (prompt, length), and the plans' kinds."""
    config = EngineConfig(model=str(GOLDEN / model), ctx_size=256, parallel=4, **{"threads": 2, **fields})
    loaded = loading.load_model(config, SingleWorld())
    try:
        engine = Engine(loaded.executable, Sampler(loaded.executable.vocab_size))
        process, found = engine.outputs.process, {}

        def record(chunks, rows):
            for chunk in chunks:
                if chunk.samples:
                    place = chunk.sequence.id, chunk.sequence.length
                    found[place] = rows[chunk.row + chunk.rows - 1].tobytes()
            return process(chunks, rows)

        engine.outputs.process = record
        for id, prompt in enumerate(prompts):
            engine.add(id, prompt, SamplingParams(max_tokens=24, temperature=0.7, seed=id, ignore_eos=True))
        while engine.has_work:
            engine.step()
        return found, loaded.executable.keys
    finally:
        loaded.close()


@pytest.mark.parametrize("model", ["llama3", "qwen3moe", "deepseek_v3", "qwen3next"])
def test_steps_of_one_role_have_the_bits_of_mixed_steps(model, monkeypatch):
    """Where the products are the same, so must be the logits; chunks of prompts end where the prompt ends."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 180, length).tolist() for length in (1, 90, 16, 45, 33)]
    mixed, _ = logits_of(model, prompts, ubatch_size=24)
    monkeypatch.setattr(loading, "has_prompt_products", lambda *_: True)
    split, keys = logits_of(model, prompts, ubatch_size=40, threads=1)
    assert [key.prompts for key in keys] == [False, True]
    assert split == mixed


@pytest.mark.parametrize("model, quantize", [("llama3", "q4_k"), ("qwen3moe", "q8_0")])
def test_quantised_prompts_have_the_same_bits_in_any_chunks(model, quantize):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 180, length).tolist() for length in (90, 1, 33, 16)]
    logits = [
        logits_of(model, prompts, ubatch_size=size, threads=threads, quantize=quantize)[0]
        for size, threads in ((24, 2), (40, 1))
    ]
    assert logits[0] == logits[1]
    alone, keys = logits_of(model, prompts[:1], quantize=quantize)
    assert alone.items() <= logits[0].items()
    assert len(keys) == 1 + (native.isa() == "amx")  # where prompts have other products

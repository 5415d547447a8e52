"""The engine's embeddings over an executable that simulates the paged cache: whatever the chunks, the pressure on the
cache and what else runs, a vector is made of the hidden states of its own tokens.
"""

import numpy as np
import pytest

from ckdist.engine.engine import Engine
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import RequestError
from tests.support.paged_executable import PagedExecutable, prefix_logits
from tests.unit.test_engine import PlainSampler

GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


def expected(prompt, pooling: str) -> np.ndarray:
    rows = np.array([prefix_logits(prompt[: n + 1], 50) for n in range(len(prompt))], np.float32)
    return {"mean": rows.mean(axis=0, dtype=np.float64), "last": rows[-1], "cls": rows[0], "none": rows}[pooling]


def finish(engine) -> tuple[dict, dict]:
    """Vectors and texts, by id."""
    vectors, texts = {}, {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            texts.setdefault(output.id, []).extend(output.tokens)
            if output.embedding is not None:
                vectors[output.id] = output.embedding
    return vectors, texts


@pytest.mark.parametrize("seed", range(8))
def test_vectors_beside_texts(seed):
    rng = np.random.default_rng(seed)
    executable = PagedExecutable(num_blocks=int(rng.integers(12, 40)), max_tokens=int(rng.integers(8, 40)))
    engine, alone = Engine(executable, PlainSampler()), Engine(PagedExecutable(), PlainSampler())
    base = rng.integers(0, 50, 70)
    prompts, poolings = {}, {}
    for index in range(14):
        own = rng.integers(0, 50, rng.integers(1, 60))
        prompts[index] = np.concatenate([base[: rng.integers(0, 64)], own])[:100].astype(np.int32)
        if index % 2:
            poolings[index] = ["mean", "last", "cls", "none"][index // 2 % 4]
            engine.embed(index, prompts[index], poolings[index])
        else:
            engine.add(index, prompts[index], GREEDY)
            alone.add(index, prompts[index], GREEDY)
    vectors, texts = finish(engine)
    _, wanted = finish(alone)
    assert vectors.keys() == poolings.keys()
    for index, vector in vectors.items():
        np.testing.assert_allclose(vector, expected(prompts[index], poolings[index]), rtol=1e-5, atol=1e-6)
    assert all(texts[index] == wanted[index] for index in wanted)
    assert engine.pool.available == executable.num_blocks, "blocks are lost"


def test_a_prefix_is_reused_where_the_last_token_alone_counts():
    engine, prompt = Engine(PagedExecutable(), PlainSampler()), np.arange(40, dtype=np.int32)
    for index, pooling in enumerate(("mean", "last", "mean")):
        engine.embed(index, prompt, pooling)
        finish(engine)
    assert engine.stats()["cached_tokens_total"] == 32


def test_an_encoder_computes_each_prompt_in_one_step():
    executable = PagedExecutable(max_tokens=32, context_length=32)
    executable.has_logits = False
    engine = Engine(executable, PlainSampler())
    prompts = [np.arange(n, dtype=np.int32) for n in (20, 20, 32, 5, 5, 1)]
    for index, prompt in enumerate(prompts * 2):
        engine.embed(index, prompt, "mean")
    vectors, _ = finish(engine)
    for index, vector in vectors.items():
        np.testing.assert_allclose(vector, expected(prompts[index % 6], "mean"), rtol=1e-5, atol=1e-6)
    assert all(first == 0 for step in executable.batches for _, first in step)
    assert engine.stats()["cached_tokens_total"] == 0 and len(executable.batches) == 6
    with pytest.raises(RequestError, match="an encoder"):
        engine.add("text", [1, 2], GREEDY)
    with pytest.raises(RequestError, match="33 tokens"):
        engine.embed("long", np.zeros(33, np.int32), "mean")


def test_refuses_an_unknown_pooling():
    with pytest.raises(RequestError, match="use one of mean, last, cls"):
        Engine(PagedExecutable(), PlainSampler()).embed(0, [1], "max")

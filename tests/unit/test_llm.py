"""The offline front end over the simulated cache: order, texts, stop strings, nothing left behind."""

import numpy as np
import pytest

from ckdist.engine.engine import Engine
from ckdist.engine.llm import LLM
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import EngineError, NativeError, RequestError
from tests.support.paged_executable import PagedExecutable, PlainSampler, alone, prefix_logits


class Letters:
    """Token 0 is "a", 1 is "b" and so on to 49."""

    def encode(self, text):
        return [ord(character) - ord("a") for character in text]

    def decoder(self):
        return self

    def step(self, token):
        return chr(ord("a") + token)

    def flush(self):
        return ""


def make(**arguments):
    return LLM.from_engine(Engine(PagedExecutable(), PlainSampler(), **arguments), Letters())


def text_of(prompt, max_tokens):
    return "".join(
        Letters().step(token)
        for token in alone(Letters().encode(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0))
    )


def test_many_prompts_in_their_order_through_a_short_queue():
    llm = make(max_waiting=2)
    prompts = ["abc"[: 1 + i % 3] * (1 + i) for i in range(20)]
    sampling = [SamplingParams(max_tokens=1 + i % 7, temperature=0.0) for i in range(20)]
    for i, completion in enumerate(llm.generate(prompts, sampling)):
        assert completion.text == text_of(prompts[i], 1 + i % 7) and completion.finish_reason == "length"
        assert completion.prompt_tokens == len(prompts[i]) and len(completion.token_ids) == 1 + i % 7
    assert not llm.engine.has_work


def test_token_prompts_logprobs_and_a_stop_string():
    llm, whole = make(), text_of("ab", 12)
    (completion,) = llm.generate(
        [[0, 1]], SamplingParams(max_tokens=12, temperature=0.0, logprobs=0, prompt_logprobs=0), stop=[whole[3:5]]
    )
    assert completion.text == whole[:3] and completion.finish_reason == "stop"
    assert len(completion.logprobs) == len(completion.token_ids) == 5 and len(completion.prompt_logprobs) == 2
    assert not llm.engine.has_work


def test_a_stream_closed_early_ends_its_sequence():
    llm = make()
    stream = llm.stream("ab", SamplingParams(max_tokens=100, temperature=0.0))
    assert next(stream) + next(stream) == text_of("ab", 2)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work


def test_a_bad_prompt_leaves_nothing_running():
    llm = make()
    for prompts in (["ab", ""], ["ab", [50]]):
        with pytest.raises(RequestError):
            llm.generate(prompts)
    assert not llm.engine.has_work
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate(["ab"], [SamplingParams()] * 2)


def test_a_lost_rank_is_raised():
    llm = make()
    llm.engine.executable.failure = EngineError("rank 1 is gone")
    with pytest.raises(EngineError, match="rank 1"):
        llm.generate("ab")


def test_logits_of_every_token():
    logits = make().logits(list(range(40)))
    assert logits.shape == (40, 50) and np.array_equal(logits[39], prefix_logits(list(range(40)), 50))


def test_close_once():
    closed = []
    with LLM.from_engine(Engine(PagedExecutable(), PlainSampler()), Letters(), close=lambda: closed.append(1)) as llm:
        pass
    llm.close()
    assert closed == [1]


def test_a_sequence_that_fails_is_an_error(monkeypatch):
    def fails(*_):
        raise NativeError("no memory for the scores")

    llm = make()
    monkeypatch.setattr(llm.engine.outputs.sampler, "logprobs", fails)
    with pytest.raises(EngineError, match="no memory for the scores"):
        llm.generate([[0, 1]], SamplingParams(max_tokens=2, prompt_logprobs=0))
    assert not llm.engine.has_work


def test_vectors_in_the_order_of_their_prompts_through_a_short_queue():
    llm = make(max_waiting=2)
    prompts = ["abcdefg"[: 1 + i % 7] for i in range(20)]
    last = np.array([prefix_logits(Letters().encode(prompt), 50) for prompt in prompts])
    np.testing.assert_array_equal(llm.embed(prompts, normalise=False), last)
    np.testing.assert_allclose(np.linalg.norm(llm.embed(prompts[:3], "mean"), axis=1), 1, rtol=1e-6)
    assert llm.embed([]).shape == (0, 0)
    llm.engine.executable.failure = EngineError("a rank is lost")
    with pytest.raises(EngineError, match="a rank is lost"):
        llm.embed(["abc", "abd"])


def test_a_prompt_without_a_vector_ends_the_others():
    llm = make()
    llm.engine.executable.run = lambda batch: np.full((len(batch.logits_indices), 50), np.nan, np.float32)
    with pytest.raises(EngineError, match="the model's hidden states are not finite numbers"):
        llm.embed(["abc", "abd"])
    assert not llm.engine.has_work and llm.engine.pool.available == llm.engine.pool.num_blocks

"""The OpenAI API through the real HTTP process and the real client, over a fake rank 0 that repeats the prompt."""

import asyncio

import httpx
import pytest

from tests.support.clients import openai
from tests.support.served import serving, wait_for

FIELDS = {"model": "any"}


@pytest.fixture(scope="module")
def served():
    with serving(parallel=8, max_queue=16) as pair:
        yield pair


@pytest.fixture
def engine(served):
    yield served[0]
    served[0].delay, served[0].refusal = 0.0, None


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served[1].url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served[1].url, timeout=10) as made:
        yield made


def chat(text):
    return [{"role": "user", "content": text}]


def test_chat(client, engine):
    answer = client.chat.completions.create(
        messages=chat("hé"), max_completion_tokens=9, seed=5, temperature=0.5, **FIELDS
    )
    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("[user]hé", "assistant", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (20, 9, 29)
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.model == "bytes"
    sampling = engine.submitted[-1]["sampling"]
    assert (sampling["seed"], sampling["temperature"], sampling["max_tokens"]) == (5, 0.5, 9)


def test_chat_stream_never_splits_characters(client):
    stream = client.chat.completions.create(
        messages=chat("日本😀"),
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"chat_template_kwargs": {"shout": True}, "stop_token_ids": [2]},  # the template's "!"
        **FIELDS,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "[user]日本😀"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 16
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_async_client_with_eight_streams(served):
    async def one(client, text):
        stream = await client.completions.create(prompt=text, max_tokens=len(text) * 3, stream=True, **FIELDS)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{served[1].url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, f"prompt {i} ") for i in range(8)))

    assert asyncio.run(all_of_them()) == [f"prompt {i} " * 3 for i in range(8)]


def test_n_choices_have_seeds_of_their_own(client, engine):
    answer = client.chat.completions.create(messages=chat("a"), n=3, seed=-2, max_tokens=4, **FIELDS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.prompt_tokens == 18 and answer.usage.completion_tokens == 12
    seeds = [message["sampling"]["seed"] for message in engine.submitted[-3:]]
    assert len(set(seeds)) == 3 and all(0 <= seed < 1 << 63 for seed in seeds)
    client.chat.completions.create(messages=chat("a"), n=3, seed=-2, max_tokens=4, **FIELDS)
    assert seeds == [message["sampling"]["seed"] for message in engine.submitted[-3:]]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_engine_too(client, engine, stream):
    engine.delay = 0.001
    answer = client.completions.create(
        prompt="one two three ", stop=["three", "xyz"], max_tokens=200, stream=stream, logprobs=1, **FIELDS
    )
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == "one two "
    assert parts[-1].choices[0].finish_reason == "stop"
    tokens = [token for part in parts if part.choices[0].logprobs for token in part.choices[0].logprobs.tokens]
    assert "".join(tokens) == "one two "
    wait_for(lambda: engine.submitted[-1]["id"] in engine.aborted)


def test_prompts_as_lists_and_token_ids(client):
    texts = client.completions.create(prompt=["ab", "cd"], max_tokens=2, n=2, **FIELDS)
    assert [(c.index, c.text) for c in texts.choices] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert texts.usage.prompt_tokens == 4 and texts.usage.completion_tokens == 8
    ids = client.completions.create(prompt=[[70, 71], [72]], max_tokens=2, echo=True, **FIELDS)
    one = client.completions.create(prompt=[70, 71], max_tokens=2, echo=True, **FIELDS)
    assert ids.choices[0].text == one.choices[0].text and len(one.choices[0].text) == 4


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(client, max_tokens, stream):
    answer = client.completions.create(
        prompt="aéb", echo=True, logprobs=2, max_tokens=max_tokens, stream=stream, **FIELDS
    )
    parts = list(answer) if stream else [answer]
    scores = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for part in parts:
        for name, values in scores.items():
            values.extend(getattr(part.choices[0].logprobs, name))
    assert "".join(part.choices[0].text for part in parts) == ("aéba\ufffd" if max_tokens else "aéb")
    assert scores["tokens"][:4] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert scores["token_logprobs"][:4] == [None, -0.5, -0.5, -0.5]
    assert (
        scores["top_logprobs"][0] is None
        and scores["top_logprobs"][3]["b"] == -0.5
        and len(scores["top_logprobs"][3]) == 2
    )
    assert scores["text_offset"] == [0, 1, 1, 2, 3, 4][: 4 + max_tokens]
    assert parts[-1].choices[0].finish_reason == "length"


def test_chat_logprobs(client):
    answer = client.chat.completions.create(messages=chat("x"), logprobs=True, top_logprobs=2, max_tokens=2, **FIELDS)
    entry = answer.choices[0].logprobs.content[1]
    assert (entry.token, entry.bytes, entry.logprob, len(entry.top_logprobs)) == ("u", [117], -0.5, 2)
    assert (
        client.chat.completions.create(messages=chat("x"), logprobs=True, max_tokens=2, **FIELDS)
        .choices[0]
        .logprobs.content[0]
        .top_logprobs
        == []
    )


def test_max_tokens_default_fills_the_context(client):
    answer = client.chat.completions.create(messages=chat("hello"), **FIELDS)
    assert answer.usage.total_tokens == 256 and answer.choices[0].finish_reason == "length"
    assert client.completions.create(prompt="hello", **FIELDS).usage.completion_tokens == 16


def test_min_tokens_do_not_ask_for_more_than_the_context_leaves(client, engine):
    client.completions.create(prompt="a" * 250, max_tokens=50, extra_body={"min_tokens": 40}, **FIELDS)
    sampling = engine.submitted[-1]["sampling"]
    assert (sampling["max_tokens"], sampling["min_tokens"]) == (6, 6)


def test_models_and_tokenize(client, http):
    assert [model.id for model in client.models.list()] == ["bytes"]
    assert client.models.retrieve("bytes").owned_by == "ckdist"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    tokens = http.post("/tokenize", json={"content": "aé"}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"content": "aé", "prompt": "aé"}
    pieces = http.post("/tokenize", json={"content": "aé", "with_pieces": True}).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == ["a", [0xC3], [0xA9]]


def test_metrics(client, http):
    client.completions.create(prompt="ab", max_tokens=2, **FIELDS)
    text = http.get("/metrics").text
    for name in (
        'ckdist_requests_total{path="/v1/completions",status="200"}',
        "ckdist_prompt_tokens_total",
        "ckdist_time_to_first_token_seconds_bucket",
        "ckdist_steps_total 3.0",
        'ckdist_step_seconds_bucket{le="0.5"} 2.0',
        'ckdist_prefill_choice_info{reason="because \\"so\\"\\n"} 1.0',
        'ckdist_state{state="ready"} 1.0',
        "ckdist_requests_running ",
    ):
        assert name in text


def test_a_client_that_goes_away_frees_its_sequence(client, engine, http):
    engine.delay = 0.02
    with client.completions.create(prompt="ab", max_tokens=250, stream=True, **FIELDS) as stream:
        next(iter(stream))
    wait_for(lambda: engine.running == 0, 2)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 250, "n": 2}, timeout=0.2)
    wait_for(lambda: engine.running == 0, 2)
    assert len(set(engine.aborted)) >= 3


def test_engine_refusals_keep_their_status(client, engine):
    engine.refusal = (429, "the queue is full")
    with pytest.raises(openai.RateLimitError, match="the queue is full"):
        client.completions.create(prompt="a", **FIELDS)
    with pytest.raises(openai.RateLimitError, match="the queue is full"):
        client.completions.create(prompt="a", stream=True, **FIELDS)


def test_more_than_the_queue_takes_is_429(http, engine, client):
    engine.delay = 0.05
    with client.completions.create(prompt="ab", n=16, max_tokens=200, stream=True, **FIELDS) as stream:
        next(iter(stream))
        answer = http.post("/v1/completions", json={"prompt": "ab", "n": 16})
        assert answer.status_code == 429 and answer.headers["retry-after"]
    answer = http.post("/v1/completions", json={"prompt": ["a"] * 25})
    assert answer.status_code == 400 and "25 sequences" in answer.json()["error"]["message"]


def test_a_model_without_a_template_chats_in_chatml():
    with serving(template=None) as (engine, process):
        answer = httpx.post(
            f"{process.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        )
        assert answer.status_code == 200 and len(engine.submitted[0]["prompt"]) == len(
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
        )

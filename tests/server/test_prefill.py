"""Prompts that are computed ahead: POST /v1/cache/prefill and --prefill-file."""

import contextlib
import json

import httpx
import pytest
from tokenizers import pre_tokenizers

from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError
from ckdist.serve.addresses import listen
from ckdist.serve.prefill_file import read_prefill_file
from ckdist.serve.process import HttpProcess
from tests.server.test_tenant_faces import key_file
from tests.support.fake_engine import FakeEngine
from tests.support.running import running
from tests.support.served import VOCAB, serving, wait_for, write_tokenizer

SYSTEM = {"role": "system", "content": "be brief"}
ASK = {"role": "user", "content": "hello"}
LATER = {"messages": [SYSTEM, ASK], "max_tokens": 1}
PATH = "/v1/cache/prefill"
CACHED = 2  # tokens that the fake engine finds in its cache


def text_of(message: dict) -> bytes:
    """The prompt of a submitted message, of a tokenizer with one token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return "".join(letters[token - 2] for token in message["prompt"]).replace("Ġ", " ").encode()


@pytest.fixture(scope="module")
def served():
    with serving() as (engine, http):
        yield engine, http.url


def post(url: str, body: dict, **headers: str) -> httpx.Response:
    return httpx.post(url + PATH, json=body, headers=headers)


@pytest.mark.parametrize(
    "body, prompt",
    [
        ({"messages": [SYSTEM]}, b"[system]be brief[user]"),
        ({"messages": [SYSTEM, ASK]}, b"[system]be brief[user]hello"),
        ({"messages": [SYSTEM, ASK], "add_generation_prompt": True}, b"[system]be brief[user]hello[assistant]"),
        ({"prompt": "import os"}, b"import os"),
    ],
)
def test_the_prompt_is_computed_and_nothing_is_generated(served, body, prompt):
    engine, url = served
    later = {"stream": True, "max_tokens": 50, "temperature": 2, "n": 2, "stop": ["x"], "logprobs": None}
    answer = post(url, body | later)
    assert answer.status_code == 200, answer.text
    sent = engine.submitted[-1]
    assert text_of(sent) == prompt and sent["sampling"]["max_tokens"] == 0
    expected = {"object": "cache.prefill", "model": "bytes", "prompt_tokens": len(prompt)}
    assert answer.json() == expected | {"cached_tokens": CACHED, "computed_tokens": len(prompt) - CACHED}


@pytest.mark.parametrize(
    "body, words",
    [
        ({}, "prompt is needed"),
        ({"prompt": ""}, "prompt is empty"),
        ({"messages": []}, "messages is needed"),
        ({"messages": [SYSTEM], "prompt": "a"}, "prompt is not supported"),
        ({"prompt": "a", "cache_prompt": False}, "nothing would be kept"),
        ({"prompt": "a" * 300}, "exceeds the available context size"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt has 0 characters"),
    ],
)
def test_wrong_bodies_are_refused_like_those_of_the_later_request(served, body, words):
    answer = post(served[1], body)
    assert answer.status_code == 400 and words in answer.text


def test_a_prompt_is_computed_for_the_tenant_of_the_key_within_its_limits(tmp_path):
    limits = '[[key]]\nname = "ann"\nkey = "ann1"\ntokens_per_minute = 20\n[[key]]\nname = "bob"\nkey = "bob1"\n'
    with serving(api_key_file=str(key_file(tmp_path, limits))) as (engine, http):
        assert post(http.url, {"prompt": "a"}).status_code == 401
        for key in ("ann1", "bob1"):
            for path, body in ((PATH, {"prompt": "a", "cache_salt": "s"}), ("/v1/completions", {"prompt": "a"})):
                body = body | {"cache_salt": "s", "max_tokens": 1}
                httpx.post(http.url + path, json=body, headers={"x-api-key": key})
        ahead, later, other, _ = [message["tenant"] for message in engine.submitted]
        assert ahead == later != other
        assert post(http.url, {"prompt": "a" * 19}, **{"x-api-key": "ann1"}).status_code == 429


def test_the_file_is_computed_for_each_tenant_before_the_first_request(tmp_path):
    file = tmp_path / "digest.jsonl"
    lines = [{"messages": [SYSTEM]}, {"prompt": "only ann", "key": "ann"}, {"prompt": "salted", "cache_salt": "s"}]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    with serving(api_key_file=str(key_file(tmp_path)), prefill_file=str(file)) as (engine, http):
        sent = [(text_of(message), message["tenant"]) for message in engine.submitted]
        digest = b"[system]be brief[user]"
        assert [text for text, _ in sent] == [digest, digest, b"only ann", b"salted", b"salted"]
        httpx.post(http.url + "/v1/chat/completions", json=LATER, headers={"x-api-key": "ann2"})
        last = engine.submitted[-1]
        assert (digest, last["tenant"]) in sent and text_of(last).startswith(digest)
        assert len({tenant for _, tenant in sent}) == 4


@contextlib.contextmanager
def starting(folder, prompts: list[dict], delay: float = 0.0):
    """A FakeEngine and an HttpProcess with a file of `prompts`, which may not be ready yet."""
    file, endpoint = folder / "digest.jsonl", f"ipc://{folder}/engine"
    file.write_text("\n".join(map(json.dumps, prompts)))
    write_tokenizer(folder)
    with FakeEngine(endpoint, VOCAB) as engine:
        engine.delay = delay
        config = ServeConfig(port=0, prefill_file=str(file))
        http = HttpProcess.start(config, endpoint, str(folder), "bytes", listen("127.0.0.1", 0))
        try:
            yield engine, http
        finally:
            http.stop()


def health(url: str) -> str:
    try:
        return httpx.get(url + "/health").text
    except httpx.TransportError:
        return ""


def test_the_server_is_not_ready_until_the_file_is_computed(tmp_path):
    with starting(tmp_path, [{"prompt": "a"}] * 3, delay=0.5) as (engine, http):
        wait_for(lambda: "the prompts of --prefill-file are being computed" in health(http.url), 60)
        assert httpx.post(http.url + "/v1/completions", json={"prompt": "a"}).status_code == 503
        engine.delay = 0.0
        wait_for(lambda: "ok" in health(http.url), 60)
        assert len(engine.submitted) == 3


def test_a_prompt_that_does_not_fit_ends_the_server_with_one_line(tmp_path):
    with starting(tmp_path, [{"prompt": "a"}, {"prompt": "a" * 300}]) as (_, http):
        wait_for(lambda: http.failure() is not None, 60)
        error = http.failure()
        assert isinstance(error, ConfigError) and "line 2: the prompt has 300 tokens" in str(error)


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("a.jsonl", '{"prompt": "a"}\n[]', "line 2 must be an object with messages or a prompt"),
        ("a.jsonl", '{"prompt": "a", "key": "eve"}', "names the key 'eve'; known are ann, bob"),
        ("a.jsonl", '{"prompt": "a", "key": ["ann"]}', "names the key"),
        ("a.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("a.txt", " \n", "is empty"),
        ("a.txt", None, "No such file"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_prefill_file(str(tmp_path / name), {"ann", "bob"})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_real_server_finds_the_prompts_of_its_file(tmp_path):
    file = tmp_path / "digest.txt"
    file.write_text("You are a coding agent. " * 20)
    with running("--prefill-file", str(file)) as url:
        messages = [{"role": "system", "content": file.read_text()}, ASK]
        usage = httpx.post(url + "/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= usage["prompt_tokens"] - 32
        answer = post(url, {"messages": messages}).json()
        assert answer["cached_tokens"] >= cached and answer["computed_tokens"] <= 16

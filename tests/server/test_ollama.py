"""Ollama's API: every call of its Python client over a running HTTP process, and bodies that are converted."""

import json

import httpx
import pytest
from tokenizers import decoders, pre_tokenizers

from ckdist.errors import RequestError
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.support.clients import ollama
from tests.support.reasoning_templates import QWEN3
from tests.support.served import VOCAB, serving, write_tokenizer

SAY = [{"role": "user", "content": "say"}]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
NUMBERS = {"num_predict": 5, "temperature": 0}


def text_of(tokens):
    """The text of the test vocabulary's tokens."""
    return decoders.ByteLevel().decode([LETTERS[token - 2] for token in tokens if 2 <= token < 258])


@pytest.fixture(scope="module")
def server():
    with serving() as (engine, http):
        yield engine, http.url


@pytest.fixture(scope="module")
def client(server):
    return ollama.Client(host=server[1])


def test_models_are_listed_shown_and_loaded(client):
    (model,) = client.list().models
    assert model.model == "bytes" and len(model.digest) == 64 and model.details.family == "fake"
    assert client.ps().models[0].context_length == 256
    shown = client.show("bytes:latest")
    assert shown.capabilities == ["completion"] and "message" in shown.template
    assert shown.modelinfo["fake.context_length"] == 256
    with pytest.raises(ollama.ResponseError, match="model 'nix' not found; this server has 'bytes'") as refused:
        client.show("nix")
    assert refused.value.status_code == 404


def test_a_chat_whole_and_in_lines_is_the_same(client):
    whole = client.chat("bytes", SAY, options=NUMBERS)
    lines = list(client.chat("bytes", SAY, options=NUMBERS, stream=True))
    assert whole.message.content == "".join(line.message.content for line in lines) != ""
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    for end in (whole, lines[-1]):
        assert (end.done_reason, end.eval_count) == ("length", 5) and end.prompt_eval_count > 3
        assert end.total_duration >= end.prompt_eval_duration >= 0 and end.load_duration == 0


def test_a_prompt_with_the_template_and_raw(client, server):
    engine, _ = server
    assert client.generate("bytes", "ab", system="cd", options=NUMBERS).response
    templated = text_of(engine.submitted[-1]["prompt"])
    assert "ab" in templated and "cd" in templated and len(templated) > 4
    raw = list(client.generate("bytes", "ab", raw=True, options=NUMBERS, stream=True))
    assert text_of(engine.submitted[-1]["prompt"]) == "ab" and "".join(part.response for part in raw) == "ababa"
    assert client.generate("bytes").done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="use POST /models/unload"):
        client.generate("bytes", keep_alive=0)


def test_defaults_are_ollamas_and_options_replace_them(client, server):
    engine, _ = server
    client.chat("bytes", SAY, options={"num_predict": 1})
    given = engine.submitted[-1]["sampling"]
    assert (given["temperature"], given["top_k"], given["top_p"], given["repetition_penalty"]) == (0.8, 40, 0.9, 1.1)
    options = {"num_predict": 1, "temperature": 0.5, "repeat_penalty": 1.2, "seed": 3, "num_ctx": 100, "num_gpu": 9}
    client.chat("bytes", SAY, options=options)
    given = engine.submitted[-1]["sampling"]
    assert (given["temperature"], given["repetition_penalty"], given["seed"]) == (0.5, 1.2, 3)


def test_long_bodies_are_read_in_text_workers_and_pictures_without_a_prompt_are_refused(client, server):
    _, url = server
    body = {"model": "bytes", "messages": SAY, "note": "a" * (1 << 17), "options": NUMBERS, "stream": False}
    assert httpx.post(f"{url}/api/chat", json=body).json()["message"]["content"]
    assert httpx.post(f"{url}/api/show", json={"model": "bytes", "note": body["note"]}).status_code == 413
    with pytest.raises(ollama.ResponseError, match="images is not supported"):
        client.generate("bytes", images=["eA=="])


def test_vectors(client):
    assert len(client.embed("bytes", ["a", "bc"]).embeddings) == 2
    assert len(client.embed("bytes", "a").embeddings[0]) == len(client.embeddings("bytes", "a").embedding) > 0


def test_models_cannot_be_changed_by_clients(client):
    assert client.pull("bytes").status == "success"
    assert [part.status for part in client.pull("bytes", stream=True)] == ["success"]
    for call in (
        lambda: client.delete("bytes"), lambda: client.copy("bytes", "b"), lambda: client.push("bytes"),
        lambda: client.create("b", from_="bytes"),
    ):  # fmt: skip
        with pytest.raises(ollama.ResponseError) as refused:
            call()
        assert refused.value.status_code == 403
    with pytest.raises(ollama.ResponseError, match="'other' not found"):
        client.pull("other")


@pytest.mark.parametrize(
    "more, words",
    [
        ({"options": {"temperature": -1}}, "temperature (-1) must be from 0"),
        ({"options": {"seed": 1}, "seed": 2}, "options.seed and seed say the same"),
        ({"options": {"n": 2}}, "n is not supported by this server; use /v1/chat/completions"),
        ({"options": 3}, "options must be an object"),
        ({"template": "x"}, "--chat-template-file"),
        ({"messages": [{"role": "user", "content": "a", "images": ["eA=="]}]}, "images"),
        ({"messages": [3]}, "messages[0] must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls[0].function must be an object"),
        ({"format": {"type": "nonsense"}}, "nonsense"),
    ],
    ids=str,
)
def test_errors_have_ollamas_form(server, more, words):
    answer = httpx.post(f"{server[1]}/api/chat", json={"model": "bytes", "messages": SAY, **more})
    assert answer.status_code == 400 and set(answer.json()) == {"error"} and words in answer.json()["error"]


def test_a_stream_has_lines_and_ends_with_an_error_line(server):
    engine, url = server
    body = {"model": "bytes", "messages": SAY, "options": {"num_predict": 200, "temperature": 0}}
    engine.delay = 0.02
    try:
        with httpx.stream("POST", f"{url}/api/chat", json=body) as answer:
            assert answer.headers["content-type"] == "application/x-ndjson"
            lines = answer.iter_lines()
            next(lines)
            engine.said.append({"op": "error", "id": engine.submitted[-1]["id"], "status": 503, "message": "lost"})
            last = json.loads(list(lines)[-1])
    finally:
        engine.delay = 0.0
    assert set(last) == {"error"}


def test_front_ends_ask_these_paths(server):
    """The paths that open-webui asks of an Ollama and of an OpenAI backend at its start."""
    for path in ("/api/version", "/api/tags", "/api/ps", "/v1/models", "/models", "/health"):
        assert httpx.get(server[1] + path).status_code == 200, path
    major, minor, *_ = httpx.get(f"{server[1]}/api/version").json()["version"].split(".")
    assert (int(major), int(minor)) >= (0, 6)


@pytest.fixture
def prepared(tmp_path):
    tokenizer = tokenizer_of(str(write_tokenizer(tmp_path, QWEN3)))

    def run(kind="ollama_chat", strict=False, **body):
        return prepare(kind, json.dumps(body).encode(), tokenizer, ModelFacts("m", VOCAB, 4096, strict))

    return run


def test_calls_and_their_results_are_matched_in_order(prepared):
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("f", "g")]
    results = [{"role": "tool", "tool_name": name, "content": text} for name, text in (("f", "1"), ("g", "2"))]
    messages = [*SAY, {"role": "assistant", "thinking": "hm", "tool_calls": calls}, *results]
    text = text_of(prepared(messages=messages).prompt_tokens(0))
    assert '{"name": "f", "arguments": {"a": 1}}' in text and "hm" in text and "<tool_response>\n2" in text


def test_strict_fields_hold_for_options_too(prepared):
    assert prepared(messages=SAY, options={"tempo": 1}).ignored == ("tempo",)
    with pytest.raises(RequestError, match="unknown field 'tempo'"):
        prepared(messages=SAY, options={"tempo": 1}, strict=True)

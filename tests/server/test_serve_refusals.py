"""What the HTTP process refuses, with which status and words; no body whatever may end in a 500."""

import contextlib
import json
import socket

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckdist.serve.requests.field_table import RULES, SAMPLING_NAMES, Neutral
from ckdist.serve.requests.params import MAX_TOKENS_NAMES
from tests.support.served import serving

KEY = {"Authorization": "Bearer second"}


@pytest.fixture(scope="module")
def served():
    with serving(api_key="first,second", max_body=1 << 16) as pair:
        yield pair


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served[1].url, timeout=20, headers=KEY) as made:
        yield made


def refusal(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (
        {"message", "type", "param", "code"}
        <= set(error)
        <= {"message", "type", "param", "code", "n_prompt_tokens", "n_ctx"}
    )
    assert error["code"] is None or isinstance(error["code"], str)
    assert error["message"].isprintable()
    return error


COMPLETION_REFUSALS = [
    ({}, "prompt is needed", "prompt"),
    ({"prompt": []}, "prompt is needed", "prompt"),
    ({"prompt": ""}, "prompt is empty", "prompt"),
    ({"prompt": 3}, "prompt must be a string or a list, not a number", "prompt"),
    ({"prompt": [1.5]}, "prompt[0] must be a string or a list of token ids", "prompt"),
    ({"prompt": [1, True]}, "a token (a boolean) that is not a whole number from 0 to 259", "prompt"),
    ({"prompt": [260]}, "a token (260)", "prompt"),
    ({"prompt": [[True]]}, "a token (a boolean)", "prompt[0]"),
    ({"prompt": "a" * 256}, "256 tokens, which exceeds the available context size", "prompt"),
    ({"prompt": "a", "temperature": 100.5}, "temperature (100.5) must be from 0 to 100", "temperature"),
    ({"prompt": "a", "temperature": "hot"}, "temperature must be a number, not a string", "temperature"),
    ({"prompt": "a", "top_p": -1}, "top_p (-1) must be from 0 to 1", "top_p"),
    ({"prompt": "a", "n": 17}, "n (17) must be from 1 to 16", "n"),
    ({"prompt": "a", "n": True}, "n must be a whole number, not a boolean", "n"),
    ({"prompt": "a", "n": 1.5}, "n must be a whole number, not 1.5", "n"),
    ({"prompt": "a", "max_tokens": -3}, "max_tokens (-3) must be from 0", "max_tokens"),
    ({"prompt": "a", "best_of": 4}, "best_of (4) is not supported", "best_of"),
    ({"prompt": "a", "logprobs": 21}, "logprobs (21) must be from 0 to 20", "logprobs"),
    ({"prompt": "a", "stop": ["x"] * 17}, "17 stop strings", "stop"),
    ({"prompt": "a", "stop": [3]}, "stop string", "stop"),
    ({"prompt": "a", "logit_bias": {"260": 1}}, "logit_bias has a key ('260')", "logit_bias"),
    ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias (101) must be from -100 to 100", "logit_bias"),
    (
        {"prompt": "a", "response_format": {"type": "json_object", "schema": {"type": "x"}}},
        "is not a grammar that can be followed",
        "response_format",
    ),
    ({"prompt": "a", "suffix": "b"}, "suffix asks for infill, as /infill does", "suffix"),
]

CHAT_REFUSALS = [
    ({}, "messages is needed", "messages"),
    ({"messages": [3]}, "messages[0] must be an object", "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role ('robot') must be one of system", "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is needed", "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only 'text' is supported", "messages"),
    (
        {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
        "top_logprobs needs logprobs",
        "top_logprobs",
    ),
    ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "must be an object with a function", "tools"),
    ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}, "max_tokens (0) must be from 1", "max_tokens"),
    (
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}},
        "cannot set 'messages'",
        "chat_template_kwargs",
    ),
]


@pytest.mark.parametrize(
    "path, body, words, param",
    [("/v1/completions", *case) for case in COMPLETION_REFUSALS]
    + [("/v1/chat/completions", *case) for case in CHAT_REFUSALS],
)
def test_wrong_fields(http, path, body, words, param):
    error = refusal(http.post(path, json=body), 400)
    assert words in error["message"] and error["param"] == param


def test_known_fields_without_effect_are_accepted(http):
    body = {
        "model": "m",
        "prompt": "a",
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "seed": None,
        "top_k": -1,
        "response_format": {"type": "text"},
        "best_of": 1,
        "stop": "",
    }
    assert http.post("/v1/completions", json=body).status_code == 200
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 9,
        "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "modalities": ["text"],
        "parallel_tool_calls": False,
    }
    assert http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"] == "[user]a\nb"


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object, not a list"),
        (b'{"prompt": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
        (b'{"\\udfff": 1}', "half a surrogate pair"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
        (b'{"temperature": 1e999, "prompt": "a"}', "temperature (inf)"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested deeper than 64"),
        (b"[" * 50000, "nested deeper than 64"),
    ],
)
def test_hostile_json(http, data, words):
    assert words in refusal(http.post("/v1/completions", content=data), 400)["message"]


def test_too_large_a_body_is_refused_while_it_arrives(http):
    refusal(http.post("/v1/completions", content=b" " * (1 << 17)), 413)
    sent = 0

    def endless():
        nonlocal sent
        while sent < 1 << 26:
            sent += 1 << 14
            yield b" " * (1 << 14)

    with contextlib.suppress(httpx.WriteError):  # the server has closed the connection before everything was sent
        refusal(http.post("/v1/completions", content=endless()), 413)
    assert sent < 1 << 25


def test_keys(served, http):
    with httpx.Client(base_url=served[1].url) as stranger:
        for path in ("/health", "/v1/health", "/health/", "/ping"):
            assert stranger.get(path).status_code == 200
        for path in ("/v1/models", "/models/", "/props", "/metrics", "/nowhere", "/v1/embeddings", "/health/x"):
            assert refusal(stranger.get(path), 401)["code"] == "invalid_api_key"
        for value in ("Bearer wrong", "Bearer", "Basic second", "second", "Bearer secondx", "Bearer s\u00e9"):
            refusal(
                stranger.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": value.encode()}), 401
            )
    assert http.get("/v1/models", headers={"Authorization": "bearer first"}).status_code == 200


def test_keys_are_not_in_the_process_list(served):
    with open(f"/proc/{served[1].pid}/cmdline", "rb") as file:
        assert b"second" not in file.read()


def test_unknown_paths_and_methods(http):
    refusal(http.get("/nowhere"), 404)
    refusal(http.get("/v1/completions"), 405)
    assert "access-control-allow-origin" not in http.get("/health", headers={"Origin": "http://evil"}).headers


def raw(url: str, data: bytes) -> bytes:
    """All that comes back for `data` until the server closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        return b"".join(parts)


def test_a_length_and_chunks_at_once(served):
    """The second request stands in what one reader takes for the body of the first."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer second\r\n"
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    answer = raw(
        served[1].url, head + b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer second\r\n\r\n"
    )
    assert (
        answer.startswith(b"HTTP/1.1 400 ") and b"contradict one another" in answer and answer.count(b"HTTP/1.1") == 1
    )


def test_head_is_get_without_a_body(http):
    for path in ("/health", "/metrics", "/v1/models"):
        answer = http.head(path)
        assert answer.status_code == 200 and answer.content == b"" and int(answer.headers["content-length"]) > 10
    assert http.head("/nowhere").status_code == 404


def test_a_key_in_its_own_header(served):
    for key, status in (("first", 200), ("second", 200), ("third", 401), ("", 401)):
        assert httpx.get(f"{served[1].url}/v1/models", headers={"X-Api-Key": key}).status_code == status


OWN_NAME = socket.gethostname().partition(".")[0]
PAGES = [  # headers of a POST on loopback without keys, its status, the remedy
    ({}, 200, ""),
    ({"Content-Type": "application/json; charset=utf-8"}, 200, ""),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 200, ""),  # curl -d
    ({"Host": "localhost:8080"}, 200, ""),
    ({"Host": "[::1]:8080"}, 200, ""),
    ({"Host": "192.0.2.1"}, 200, ""),
    ({"Host": "host.docker.internal:8080"}, 200, ""),
    ({"Host": f"{OWN_NAME}.local"}, 200, ""),
    ({"Host": "evil.local"}, 403, "--allowed-host"),
    ({"Host": "attacker.internal:8080"}, 403, "--allowed-host"),
    ({"Host": "host.docker.internal.evil.internal"}, 403, "--allowed-host"),
    ({"Host": "models.example"}, 200, ""),
    ({"Host": "evil.example", "Content-Type": "text/plain"}, 403, "--allowed-host"),
    (
        {"Host": "evil.example:8080", "Origin": "http://evil.example:8080", "Content-Type": "application/json"},
        403,
        "--allowed-host",
    ),
    ({"Host": "localhost.evil.example"}, 403, "--allowed-host"),
    ({"Host": "["}, 403, "--allowed-host"),
    ({"Content-Type": "text/plain"}, 415, "application/json"),
    ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, 403, "--cors-origin"),
    ({"Origin": "null", "Content-Type": "application/x-www-form-urlencoded"}, 403, "--cors-origin"),
    ({"Sec-Fetch-Site": "cross-site", "Content-Type": "application/x-www-form-urlencoded"}, 403, "origin"),
    ({"Sec-Fetch-Site": "same-site", "Content-Type": "application/json"}, 403, "origin"),
    ({"Content-Encoding": "gzip"}, 415, "the body has the encoding 'gzip': send it without Content-Encoding"),
    ({"Content-Encoding": "Identity"}, 200, ""),
    (httpx.Headers([("Content-Encoding", "identity"), ("Content-Encoding", "br")]), 415, "encoding 'identity, br'"),
    ({"Sec-Fetch-Site": "none", "Content-Type": "application/x-www-form-urlencoded"}, 415, "application/json"),
    ({"Host": "localhost:8080", "Origin": "http://localhost:8080", "Content-Type": "application/json"}, 200, ""),
    ({"Origin": "https://chat.example", "Content-Type": "application/json"}, 200, ""),
    ({"Origin": "https://chat.example", "Content-Type": "text/plain"}, 415, "application/json"),
]


@pytest.fixture(scope="module")
def local():
    with serving(cors_origin=("https://chat.example",), allowed_host=("models.example",)) as (_, process):
        yield process.url


@pytest.mark.parametrize("headers, status, words", PAGES)
def test_pages_of_other_sites(local, headers, status, words):
    answer = httpx.post(f"{local}/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers)
    assert answer.status_code == status, answer.text
    assert status == 200 or words in refusal(answer, status)["message"]
    assert answer.headers.get("access-control-allow-origin") == (
        "https://chat.example" if "chat" in headers.get("Origin", "") else None
    )


def test_a_browser_asks_before_it_sends(local):
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    answer = httpx.options(f"{local}/v1/chat/completions", headers={"Origin": "https://chat.example", **asks})
    assert answer.status_code == 204 and answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert (
        "POST" in answer.headers["access-control-allow-methods"]
        and "x-stainless-os" in answer.headers["access-control-allow-headers"]
    )
    other = httpx.options(f"{local}/v1/chat/completions", headers={"Origin": "https://evil.example", **asks})
    assert not [name for name in other.headers if name.startswith("access-control")]
    refused = httpx.get(f"{local}/v1/nowhere", headers={"Origin": "https://chat.example"})
    assert refused.status_code == 404 and refused.headers["access-control-allow-origin"] == "https://chat.example"


def test_a_key_stands_for_the_name(served):
    """Where clients send a key a page cannot know it, so a proxy may pass on whatever name it is called by."""
    assert httpx.get(f"{served[1].url}/v1/models", headers={**KEY, "Host": "models.example"}).status_code == 200


def test_broken_http_is_survived(served, http):
    address = served[1].url.removeprefix("http://").split(":")
    for data in (
        b"\x16\x03\x01",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"A" * 100_000,
    ):
        with socket.create_connection((address[0], int(address[1])), 5) as connection:
            try:
                connection.sendall(data)
                connection.recv(1 << 16)
            except OSError:
                pass
    assert http.get("/v1/models").status_code == 200


NAMES = [
    "prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "stream", "logprobs",
    "top_logprobs", "echo", "seed", "logit_bias", "stream_options", "response_format", "stop_token_ids",
    "ignore_eos", "content", "tokens", "chat_template_kwargs", "tools", "role", "type", "text", "thinking",
    "reasoning", "documents", "functions", "function_call", "tool_choice", "modalities", "suffix", "best_of",
    "lora", "response_fields", "stop", "include_stop_str_in_output", "skip_special_tokens", "return_token_ids",
    "timings_per_token", "n_probs", "add_special", "add_special_tokens", "parse_special", "with_pieces",
    "return_token_strs", "dry_sequence_breakers", "samplers", "think", "enable_thinking", "reasoning_effort",
    "scale", *MAX_TOKENS_NAMES, *sorted(n for n, rule in RULES["chat"].items() if isinstance(rule, Neutral)),
    *SAMPLING_NAMES,
]  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["user", "text", "assistant"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
PROMPTED = st.builds(
    lambda body, prompt, max_tokens: {**body, "prompt": prompt, "max_tokens": max_tokens},
    BODIES,
    st.text(max_size=8) | st.lists(st.integers(0, 260), max_size=5),
    st.integers(0, 4),
)
CHATS = st.builds(
    lambda body, text: {**body, "messages": [{"role": "user", "content": text}], "max_tokens": 3},
    BODIES,
    VALUES | st.text(max_size=8),
)
PATHS = ["/v1/completions", "/v1/chat/completions", "/completion", "/apply-template", "/tokenize", "/detokenize"]


@given(st.sampled_from(PATHS), VALUES | BODIES | PROMPTED | CHATS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_json_is_answered_with_200_or_4xx(http, path, body):
    answer = http.post(path, content=json.dumps(body).encode())
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, (body, answer.text)
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        assert path == "/completion" or answer.text.endswith("data: [DONE]\n\n")
    elif answer.status_code != 200:
        refusal(answer, answer.status_code)


@given(st.sampled_from(PATHS), st.binary(max_size=60))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_answered_with_4xx(http, path, data):
    assert 400 <= http.post(path, content=data).status_code < 500

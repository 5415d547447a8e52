"""What llama-server promises its clients of grammars, tools, embeddings and ranking, asked of a running server.

docs/how/answers.md has the table of what agrees and what differs.
"""

import base64
import json

import httpx
import jsonschema
import numpy as np
import pytest

from ckdist.engine.load_model import BUNDLED
from tests.support.adapters import random_adapter
from tests.support.running import running

SUCCESS = {"type": "object", "properties": {"success": {"type": "boolean", "const": True}}, "required": ["success"]}
CODE = {"type": "object", "properties": {"code": {"type": "string", "maxLength": 40}}, "required": ["code"]}
TOOLS = {
    name: {"type": "function", "function": {"name": name, "parameters": {**schema, "additionalProperties": False}}}
    for name, schema in (("test", SUCCESS), ("python", CODE))
}
DOCUMENTS = ["def f(x):", "import os", "the sea and the ship", "class A:\n    pass"]


@pytest.fixture(scope="module")
def http(tmp_path_factory):
    """With an adapter, so that all below is tried with one."""
    adapter = tmp_path_factory.mktemp("lora") / "adapter"
    random_adapter(adapter, BUNDLED, ("q_proj", "down_proj"), scale=0.03)
    flags = ("--pooling", "mean", "--lora", str(adapter))
    with running(*flags) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def chat(http, **fields) -> httpx.Response:
    messages = [{"role": "system", "content": "You write code."}, {"role": "user", "content": "An example, please."}]
    return http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 80, **fields})


def content(http, **fields) -> str:
    answer = chat(http, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields, wanted",
    [
        ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, '"42"'),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "foo"}}}}, '"foo"'),
        ({"json_schema": {"const": "42"}}, '"42"'),
        ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
    ],
)
def test_what_leaves_no_choice_is_written(http, fields, wanted):
    assert content(http, **fields) == wanted


def test_a_schema_beside_other_fields(http):
    """Choices, log probabilities, a stop string, streams, and a prompt whose beginning is in the cache."""
    schema = {"type": "object", "properties": {"code": {"type": "string", "maxLength": 12}}, "required": ["code"]}
    form = {"response_format": {"type": "json_object", "schema": {**schema, "additionalProperties": False}}}
    given = {**form, "n": 3, "seed": 5, "logprobs": True, "top_logprobs": 2}
    first, again = (chat(http, **given).json() for _ in range(2))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert texts == [choice["message"]["content"] for choice in again["choices"]] and len(set(texts)) > 1
    for choice, text in zip(first["choices"], texts, strict=True):
        jsonschema.validate(json.loads(text), schema)
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == text
    lines = chat(http, **form, n=3, seed=5, stream=True).text.splitlines()
    streamed = ["", "", ""]
    for line in lines:
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == texts
    assert content(http, **form, seed=5, stop=["code"]) == '{"'


def test_objects_and_lists(http):
    assert content(http, response_format={"type": "json_object"}, max_tokens=5).startswith("{")
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4}
    jsonschema.validate(json.loads(content(http, response_format={"type": "json_object", "schema": numbers})), numbers)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "sound"},
        {"type": "json_object", "schema": 123},
        {"type": "json_object", "schema": {"type": 123}},
        {"type": "json_object", "schema": {"type": "hiccup"}},
    ],
)
def test_formats_that_are_none(http, form):
    answer = chat(http, response_format=form)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"role": "system", "content": "test"}, {}],
    ],
)
def test_messages_that_are_none(http, messages):
    answer = chat(http, messages=messages)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", TOOLS)
def test_a_required_call(http, name, stream):
    fields = {"tools": [TOOLS[name]], "tool_choice": "required", "parallel_tool_calls": False, "stream": stream}
    answer = chat(http, **fields)
    assert answer.status_code == 200, answer.text
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        parts = [part for event in events for part in event["choices"][0]["delta"].get("tool_calls") or []]
        assert not any(event["choices"][0]["delta"].get("content") for event in events)
        found = "".join(part["function"].get("name") or "" for part in parts)
        arguments = "".join(part["function"].get("arguments") or "" for part in parts)
    else:
        message = answer.json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert not message["content"] and call["id"]
        found, arguments = call["function"]["name"], call["function"]["arguments"]
    assert found == name
    jsonschema.validate(json.loads(arguments), TOOLS[name]["function"]["parameters"])


@pytest.mark.parametrize(
    "fields", [{}, {"tools": [TOOLS["test"]]}, {"tools": [*TOOLS.values()], "tool_choice": "none"}]
)
def test_no_call_where_none_is_made(http, fields):
    answer = chat(http, **fields, temperature=0)
    assert answer.status_code == 200 and "tool_calls" not in answer.json()["choices"][0]["message"]


def test_embeddings_are_normalised_and_the_same_for_the_same_text(http):
    texts = ["the meaning of life", "a joke", "the meaning of life", "a long text " * 40]
    made = http.post("/v1/embeddings", json={"input": texts}).json()
    vectors = np.array([item["embedding"] for item in made["data"]])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(vectors[0], vectors[2])
    assert made["usage"]["prompt_tokens"] == made["usage"]["total_tokens"] > 40
    coded = http.post("/v1/embeddings", json={"input": texts[0], "encoding_format": "base64"}).json()
    decoded = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(decoded, vectors[0], atol=1e-6)


@pytest.mark.parametrize(
    "given, count",
    [
        ("string", 1),
        ([12, 34, 56], 1),
        ([12, 34, "string", 56], 1),
        (["one", [12, 34]], 2),
        ([[12, 34], [12, "string", 34]], 2),
        ([{"prompt_string": "string", "multimodal_data": []}, "string"], 2),
    ],
)
def test_texts_and_token_ids_may_stand_beside_each_other(http, given, count):
    made = http.post("/v1/embeddings", json={"input": given})
    assert made.status_code == 200 and len(made.json()["data"]) == count


@pytest.mark.parametrize(
    "given", [[], {"content": "string"}, {"prompt_string": "", "multimodal_data": ["x"]}, "This is a test " * 2000]
)
def test_inputs_that_are_none_or_too_long(http, given):
    answer = http.post("/v1/embeddings", json={"input": given})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize("most, count", [(None, 4), (2, 2), (4, 4), (99, 4)])
def test_ranking(http, most, count):
    top = {} if most is None else {"top_n": most}
    query = {"query": DOCUMENTS[2], **top}
    ranked = http.post("/rerank", json={**query, "documents": DOCUMENTS}).json()
    scores = [result["relevance_score"] for result in ranked["results"]]
    assert ranked["results"][0]["index"] == 2 and scores == sorted(scores, reverse=True) and len(scores) == count
    assert ranked["usage"]["prompt_tokens"] == ranked["usage"]["total_tokens"] > 0
    plain = http.post("/rerank", json={**query, "texts": DOCUMENTS}).json()
    assert plain == [{"index": result["index"], "score": result["relevance_score"]} for result in ranked["results"]]


@pytest.mark.parametrize("documents", [[], None, 123, [1, 2, 3]])
def test_documents_that_are_none(http, documents):
    answer = http.post("/rerank", json={"query": "q", "documents": documents})
    assert answer.status_code == 400 and answer.json()["error"]["message"]

"""Tools and reasoning over the real HTTP process. The engine repeats the prompt, so the last message is the answer."""

import json

import httpx
import pytest

from tests.support.clients import openai
from tests.support.served import serving

# The last message's text comes first: it is what the fake engine answers.
TEMPLATE = (
    "{{ messages[-1].content }}{% if tools and messages[-1].role == 'user' %}{{ tools | tojson }}{% endif %}"
    "{% if false %}<think>{% endif %}"
    "{% for c in messages[-1].tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("get", "put")
]
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>Hm.</think>\nLet me see.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def served():
    with serving({"context_length": 4096}, TEMPLATE, parallel=4, max_queue=8, special_tokens_in_text=True) as pair:
        yield pair


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served[1].url}/v1", api_key="none", max_retries=0)


def ask(client, text, **fields):
    messages = [{"role": "user", "content": text}]
    given = {"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": len(text.encode()), **fields}
    return client.chat.completions.create(**given)


def test_calls_and_reasoning_of_a_whole_answer(client):
    choice = ask(client, ANSWER).choices[0]
    message = choice.message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Let me see.", "Hm.", "Hm.")
    assert [(call.type, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("function", "get", {"city": "Rome"})
    ] * 2
    ids = {call.id for call in message.tool_calls}
    assert len(ids) == 2 and all(len(id) == 9 and id.isalnum() for id in ids)
    assert choice.finish_reason == "length"  # the fake engine knows no other end


@pytest.mark.parametrize("n", [1, 2])
def test_the_same_in_a_stream(client, n):
    found: dict = {index: ["", "", {}] for index in range(n)}
    roles = []
    for chunk in ask(client, ANSWER, stream=True, n=n, logprobs=True):
        choice = chunk.choices[0]
        delta, own = choice.delta, found[choice.index]
        roles += [delta.role] if delta.role else []
        own[0] += delta.content or ""
        own[1] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.function.name:
                assert call.index == len(own[2]) and call.type == "function"
                own[2][call.index] = [call.id, call.function.name, ""]
            own[2][call.index][2] += call.function.arguments
    assert roles == ["assistant"] * n
    for content, reasoning, calls in found.values():
        assert (content, reasoning) == ("Let me see.", "Hm.")
        assert [(name, json.loads(text)) for _, name, text in calls.values()] == [("get", {"city": "Rome"})] * 2


def test_an_end_with_calls_is_named_so(client):
    text = f"{CALL}<|end|>"  # which the fake engine ends with
    stopped = ask(client, text, max_tokens=500)
    assert stopped.choices[0].finish_reason == "tool_calls" and stopped.choices[0].message.content is None
    *_, last = ask(client, text, max_tokens=500, stream=True)
    assert last.choices[0].finish_reason == "tool_calls"
    assert ask(client, "yes<|end|>", max_tokens=500).choices[0].finish_reason == "stop"


def test_one_call_where_more_are_not_wanted_and_none_where_none_is(client):
    assert len(ask(client, ANSWER, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    plain = ask(client, ANSWER, tool_choice="none").choices[0].message
    assert plain.tool_calls is None and plain.content.endswith(CALL)
    whole = ask(client, ANSWER, extra_body={"reasoning_format": "none"}).choices[0].message
    assert whole.content.startswith("<think>")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "put"}}])
def test_a_call_that_must_come_is_a_grammar(served, client, choice):
    ask(client, ANSWER, tool_choice=choice)
    grammar = served[0].submitted[-1]["sampling"]["grammar"]
    assert '"put\\"' in grammar or "put" in grammar
    assert ("get" in grammar) == (choice == "required")
    ask(client, ANSWER)
    assert served[0].submitted[-1]["sampling"]["grammar"] is None
    ask(client, ANSWER, response_format={"type": "json_object"})
    assert "@answer" in served[0].submitted[-1]["sampling"]["grammar"]


def test_arguments_of_history_are_objects_in_the_template(served):
    call = {"id": "a", "type": "function", "function": {"name": "get", "arguments": '{"city": "Rome"}'}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {"messages": messages, "add_generation_prompt": False}
    rendered = httpx.post(f"{served[1].url}/apply-template", json=body).json()["prompt"]
    assert '{"city": "Rome"}' in rendered


WRONG = [
    ({"tools": [{"type": "function"}]}, "tools[0] must be an object with a function"),
    ({"tools": [{"type": "web_search"}]}, "only 'function' and 'custom' are known"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "needs a name"),
    ({"tools": TOOLS * 2}, "two tools of one name"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "must be one of"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "not among the tools"),
    ({"tools": [], "tool_choice": "required"}, "there are no tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "an object"),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}
            ],
            "tool_choice": "required",
        },
        "is not a grammar",
    ),
    ({"messages": [{"role": "assistant", "content": "a", "reasoning": 3}]}, "reasoning must be a string"),
]


@pytest.mark.parametrize("fields, message", WRONG)
def test_wrong_tools_are_refused_by_name(served, fields, message):
    body = {"messages": [{"role": "user", "content": "q"}], **fields}
    answer = httpx.post(f"{served[1].url}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in fields

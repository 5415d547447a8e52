"""Anthropic's API and OpenAI's responses, by their own clients. The engine repeats the prompt."""

import json

import httpx
import pytest

from tests.server.test_tools import ANSWER, CALL, TEMPLATE, TOOLS
from tests.support.clients import anthropic, openai
from tests.support.served import serving

ANTHROPIC_TOOLS = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
RESPONSE_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
USER = lambda text: [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def served():
    with serving({"context_length": 4096}, TEMPLATE, parallel=4, max_queue=8, special_tokens_in_text=True) as pair:
        yield pair


@pytest.fixture
def claude(served):
    return anthropic.Anthropic(base_url=served[1].url, api_key="none", max_retries=0)


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served[1].url}/v1", api_key="none", max_retries=0)


def test_messages_whole(claude):
    made = claude.messages.create(model="m", max_tokens=400, messages=USER(f"{ANSWER}<|end|>"), tools=ANTHROPIC_TOOLS)
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert made.content[0].thinking == "Hm." and made.content[1].text == "Let me see."
    assert (made.content[2].name, made.content[2].input) == ("get", {"city": "Rome"}) and made.content[2].id
    assert (made.stop_reason, made.role, made.type) == ("tool_use", "assistant", "message")
    assert made.usage.input_tokens + made.usage.cache_read_input_tokens > 200 and made.usage.output_tokens > 100
    short = claude.messages.create(model="m", max_tokens=3, messages=USER("hello"), system="s")
    assert (short.content[0].text, short.stop_reason) == ("s\nh", "max_tokens")  # the system message comes first
    stopped = claude.messages.create(model="m", max_tokens=9, messages=USER("hello"), stop_sequences=["l"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("he", "stop_sequence", "l")


def test_messages_in_a_stream(claude):
    given = {"model": "m", "max_tokens": 400, "messages": USER(f"{ANSWER}<|end|>"), "tools": ANTHROPIC_TOOLS}
    with claude.messages.stream(**given) as stream:
        names = [event.type for event in stream]
        made = stream.get_final_message()
    assert names[0] == "message_start" and names[-1] == "message_stop"
    assert names.count("content_block_start") == names.count("content_block_stop") == 4
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert made.content[3].input == {"city": "Rome"} and made.stop_reason == "tool_use"


def test_history_and_choices_of_messages(served, claude):
    history = [
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "a", "name": "get", "input": {"city": "Rome"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "21"}]},
    ]
    given = {"model": "m", "max_tokens": 5, "messages": history, "tools": ANTHROPIC_TOOLS}
    claude.messages.create(**given, tool_choice={"type": "tool", "name": "put"})
    assert "put" in served[0].submitted[-1]["sampling"]["grammar"]
    claude.messages.create(**given, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert served[0].submitted[-1]["sampling"]["grammar"] is None
    assert claude.messages.count_tokens(model="m", messages=USER("hello")).input_tokens == 5


@pytest.mark.parametrize(
    "body, message",
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "max_tokens is needed"),
        ({"max_tokens": 3}, "messages is needed"),
        ({"max_tokens": 3, "messages": [3]}, "must be an object"),
        ({"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not known"),
        ({"max_tokens": 3, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be a string"),
        ({"max_tokens": 3, "messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": "x"}}, "one of"),
        (
            {"max_tokens": 3, "messages": [{"role": "user", "content": "a"}], "tools": [{"type": 3}]},
            "a type that is a string",
        ),
    ],
)
def test_wrong_messages_are_errors_in_anthropics_shape(served, body, message):
    answer = httpx.post(f"{served[1].url}/v1/messages", json=body)
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert answer.json()["error"].keys() == {"type", "message"}
    assert answer.json()["error"]["type"] == "invalid_request_error" and message in answer.json()["error"]["message"]


def test_responses_whole(client):
    made = client.responses.create(model="m", input=f"{ANSWER}<|end|>", tools=RESPONSE_TOOLS, max_output_tokens=400)
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call", "function_call"]
    assert made.output_text == "Let me see." and made.status == "completed"
    assert (made.output[2].name, json.loads(made.output[2].arguments)) == ("get", {"city": "Rome"})
    assert made.tools[0].name == "get" and made.usage.output_tokens > 100
    short = client.responses.create(model="m", input="hello", max_output_tokens=2, instructions="s")
    assert short.output_text == "s\n" and short.status == "incomplete"
    assert short.incomplete_details.reason == "max_output_tokens"


def test_responses_in_a_stream(client):
    given = {"model": "m", "input": USER(f"{ANSWER}<|end|>"), "tools": RESPONSE_TOOLS, "max_output_tokens": 400}
    found = list(client.responses.create(**given, stream=True))
    names = [event.type for event in found]
    assert names[:2] == ["response.created", "response.in_progress"] and names[-1] == "response.completed"
    assert [event.sequence_number for event in found] == list(range(len(found)))
    text = "".join(event.delta for event in found if event.type == "response.output_text.delta")
    assert text == found[-1].response.output_text == "Let me see."
    done = [event for event in found if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": "Rome"}] * 2
    with client.responses.stream(**given) as stream:
        assert [event.type for event in stream][-1] == "response.completed"


def test_history_and_formats_of_responses(served, client):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "function_call", "call_id": "a", "name": "get", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "a", "output": "21"},
        {"role": "user", "content": CALL},
    ]
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    form = {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": schema}}
    client.responses.create(model="m", input=items, text=form, max_output_tokens=5)
    assert '"answer"' in served[0].submitted[-1]["sampling"]["grammar"]
    choice = {"type": "function", "name": "put"}
    client.responses.create(model="m", input=items, tools=RESPONSE_TOOLS, tool_choice=choice, max_output_tokens=5)
    assert "put" in served[0].submitted[-1]["sampling"]["grammar"]
    for wrong in ({}, {"input": [3]}, {"input": "a", "background": True}, {"input": [{"type": "x"}]}):
        assert httpx.post(f"{served[1].url}/v1/responses", json=wrong).status_code == 400
    huge = httpx.post(f"{served[1].url}/v1/responses", json={"input": "a", "metadata": {"k": 10**30}})
    assert "metadata has a whole number of more than 64 bits" in huge.text and huge.status_code == 400

"""Harmony's channels over the real HTTP process. The engine repeats the prompt, so the last message is the answer."""

import json

import pytest

from tests.support.clients import openai
from tests.support.served import serving

TEMPLATE = (
    "{{ messages[-1].content }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if false %}<|channel|>final<|message|>{% endif %}{{ '<|start|>assistant' }}"
)
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}]
THOUGHT = "<|channel|>analysis<|message|>Hm."  # whose end is the end of all in this vocabulary
CALL = '<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "Rome"}'
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes."


@pytest.fixture(scope="module")
def served():
    with serving({"context_length": 4096}, TEMPLATE, parallel=4, max_queue=8) as pair:
        yield pair


def ask(served, text, **fields):
    client = openai.OpenAI(base_url=f"{served[1].url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="m", messages=messages, max_tokens=len(text.encode()), **fields)


def test_channels_of_a_whole_answer_and_in_a_stream(served):
    message = ask(served, THOUGHT + FINAL).choices[0].message
    assert (message.content, message.reasoning_content, message.tool_calls) == ("Yes.", "Hm.", None)
    message = ask(served, THOUGHT + CALL, tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    assert (message.content, message.reasoning_content) == (None, "Hm.")
    assert (call.function.name, json.loads(call.function.arguments)) == ("get", {"city": "Rome"})
    deltas = [
        chunk.choices[0].delta for chunk in ask(served, THOUGHT + CALL, tools=TOOLS, stream=True) if chunk.choices
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    calls = [delta.tool_calls[0].function for delta in deltas if delta.tool_calls]
    assert calls[0].name == "get" and "".join(call.arguments for call in calls) == '{"city": "Rome"}'
    assert not any(delta.content for delta in deltas)


def test_reasoning_is_content_where_it_is_not_to_be_told_apart(served):
    message = ask(served, THOUGHT + FINAL, extra_body={"reasoning_format": "none"}).choices[0].message
    assert message.content == "Hm.\n\nYes."


def test_what_must_come_is_a_grammar_of_channels(served):
    ask(served, FINAL, tools=TOOLS, tool_choice="required")
    grammar = served[0].submitted[-1]["sampling"]["grammar"]
    assert "commentary to=functions.get " in grammar and "final" not in grammar
    ask(served, FINAL, response_format={"type": "json_object"})
    assert "channel|>final" in served[0].submitted[-1]["sampling"]["grammar"]

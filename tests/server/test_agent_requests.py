"""Requests of coding agents: tools that a provider would run, tools of free text, and the items that both leave."""

import json
import time

import httpx
import pytest

from ckdist.errors import RequestError
from ckdist.serve.chat_message import custom_text
from ckdist.serve.paths.absent import NAMES
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.tokenizer_source import tokenizer_of
from tests.server.test_tools import ANSWER, TEMPLATE, TOOLS
from tests.support.clients import openai
from tests.support.served import TEMPLATE as ALL_MESSAGES
from tests.support.served import VOCAB, serving, write_tokenizer

RUN = {"type": "function", "name": "run", "parameters": {"type": "object", "properties": {"command": {}}}}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
ASK = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
SAYS_PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** \\"a\\"\\n+ b"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_of(
        str(
            write_tokenizer(
                tmp_path_factory.mktemp("model"),
                ALL_MESSAGES.replace("m.content", "(m.content or '') + (m.reasoning_content or '')"),
            )
        )
    )


@pytest.fixture
def prompt(tokenizer):
    """The prompt that a body of a kind becomes, as text; `prepared` is all of it."""

    def text(kind, **body):
        work = text.prepared = prepare(kind, json.dumps(body).encode(), tokenizer, ModelFacts("m", VOCAB, 1 << 20))
        return tokenizer.decode(work.prompt_tokens(0))

    return text


@pytest.fixture(scope="module")
def served():
    with serving({"context_length": 8192}, TEMPLATE, parallel=4, max_queue=8, special_tokens_in_text=True) as pair:
        yield pair


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served[1].url}/v1", api_key="none", max_retries=0)


def test_tools_that_a_provider_runs_are_left_out_and_named(prompt):
    hosted = [{"type": kind} for kind in ("web_search", "file_search", "local_shell", "mcp", "namespace", "web_search")]
    text = prompt("response", input=[ASK], tools=[RUN, *hosted], tool_choice="auto")
    assert '"run"' in text and "web_search" not in text
    assert prompt.prepared.skipped == ("web_search", "file_search", "local_shell", "mcp", "namespace")
    kinds = ("web_search_20250305", "code_execution_20250825", "memory_20250818", "computer_20250124")
    client_run = [{"type": "bash_20250124", "name": "bash"}, {"type": "text_editor_20250728", "name": "edit"}]
    tools = [*client_run, *({"type": kind, "name": kind} for kind in kinds)]
    text = prompt("messages", max_tokens=5, messages=[{"role": "user", "content": "q"}], tools=tools)
    assert '"bash"' in text and '"old_str"' in text and prompt.prepared.skipped == kinds
    for choice in ({"type": "web_search"}, {"type": "function", "name": "other"}):
        with pytest.raises(RequestError, match="tool_choice names"):
            prompt("response", input=[ASK], tools=[RUN, *hosted], tool_choice=choice)


def test_a_tool_of_free_text_is_told_with_its_grammar(prompt):
    for kind, tools in (("response", [PATCH]), ("chat", [{"type": "custom", "custom": PATCH}])):
        given = {"input": [ASK]} if kind == "response" else {"messages": [{"role": "user", "content": "q"}]}
        text = prompt(kind, **given, tools=tools)
        assert "start: /.+/" in text and '"input"' in text and prompt.prepared.answer.custom == ("patch",)
        choice = {"type": "custom", "name": "patch"}
        prompt(kind, **given, tools=tools, tool_choice=choice if kind == "response" else {**choice, "custom": choice})
        assert "patch" in prompt.prepared.sampling.grammar


ITEMS = [
    ({"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a "b"'}, '{"input": "a \\"b\\""}'),
    ({"type": "custom_tool_call_output", "call_id": "c", "output": "done"}, "[tool]done"),
    ({"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}}, '["ls"]'),
    ({"type": "local_shell_call_output", "call_id": "c", "output": "a.txt"}, "[tool]a.txt"),
    ({"type": "web_search_call", "id": "w", "action": {"query": "q"}}, '[web_search_call {"action": {"query": "q"}}]'),
    ({"type": "mcp_call", "name": "f", "output": "21"}, '"output": "21"'),
    ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a.txt"},
      {"type": "input_text", "text": "b.txt"}]}, "[tool]a.txt\nb.txt"),
    ({"type": "function_call_output", "call_id": "c", "output": {"n": 1}}, '[tool]{"n": 1}'),
]  # fmt: skip


@pytest.mark.parametrize("item, told", ITEMS, ids=[f"{item['type']}-{i}" for i, (item, _) in enumerate(ITEMS)])
def test_items_of_the_history_reach_the_prompt_as_text(prompt, item, told):
    assert told in prompt("response", input=[ASK, item, ASK])


def test_reasoning_of_the_history_belongs_to_what_follows(prompt):
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": "Yes."}
    assert "[assistant]Yes.Hm.[user]" in prompt("response", input=[ASK, thought, said, ASK])
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert "[assistant]Yes.[user]" in prompt("response", input=[ASK, sealed, said, ASK])


@pytest.mark.parametrize(
    "item", [{"type": "function_call_output", "call_id": "c", "output": [PICTURE]}, {"type": "message", "role": "user",
    "content": [PICTURE]}, {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "item_reference", "id": "x"}], ids=lambda item: item["type"]
)  # fmt: skip
def test_pictures_and_unknown_items_are_refused(prompt, item):
    with pytest.raises(RequestError, match=r"input\[1\]") as error:
        prompt("response", input=[ASK, item])
    assert error.value.field == "input"


@pytest.mark.parametrize("empty", ["", []])
def test_a_probe_with_an_empty_input_is_answered(served, empty):
    answer = httpx.post(
        f"{served[1].url}/v1/responses", json={"input": empty, "max_output_tokens": 1, "instructions": "s"}
    )
    assert answer.status_code == 200, answer.text


def test_some_of_the_tools_may_be_allowed(prompt):
    ask, names = (
        {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS},
        [{"type": "function", "function": {"name": "put"}}],
    )
    for mode in ("auto", "required"):
        text = prompt(
            "chat", **ask, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
        )
        assert '"put"' in text and '"get"' not in text
        assert (prompt.prepared.sampling.grammar is not None) == (mode == "required")
    flat = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "run"}, {"type": "mcp"}],
    }
    assert '"run"' in prompt("response", input=[ASK], tools=[RUN, PATCH], tool_choice=flat)
    assert "patch" not in prompt.prepared.sampling.grammar
    names[0]["function"]["name"] = "other"
    with pytest.raises(RequestError, match="'other', which is not among the tools"):
        prompt("chat", **ask, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": names}})


BLOCKS = [
    (
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Oslo"}, "title": "T"},
        "T\nOslo",
    ),
    ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Oslo"}]}}, "Oslo"),
    (
        {"type": "search_result", "source": "u", "title": "T", "content": [{"type": "text", "text": "Oslo"}]},
        "T\nu\nOslo",
    ),
    ({"type": "server_tool_use", "name": "web_search", "input": {"query": "q"}}, '"query": "q"'),
    ({"type": "web_search_tool_result", "content": [{"title": "T", "encrypted_content": "zz"}]}, '"title": "T"'),
]


@pytest.mark.parametrize("block, told", BLOCKS, ids=[block["type"] for block, _ in BLOCKS])
def test_blocks_of_text_are_read(prompt, block, told):
    ask = lambda content: prompt("messages", max_tokens=5, messages=[{"role": "user", "content": content}])
    assert told in ask([block]) and "zz" not in ask([block])
    assert f"[tool]{told}" in ask(
        [{"type": "tool_result", "tool_use_id": "a", "content": [block]}]
    ) or "[tool][" in ask([{"type": "tool_result", "tool_use_id": "a", "content": [block]}])


@pytest.mark.parametrize(
    "block", [{"type": "document", "source": {"type": "base64", "data": "AA"}}, {"type": "image"},
    {"type": "document", "source": {"type": "text", "data": "a"}, "citations": {"enabled": True}}], ids=str
)  # fmt: skip
def test_blocks_that_are_no_text_are_refused(prompt, block):
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\]"):
        prompt("messages", max_tokens=5, messages=[{"role": "user", "content": [block]}])


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_anthropics_structured_output_is_a_grammar(prompt, field):
    form = {"type": "json_schema", "schema": SCHEMA}
    given = {field: {"format": form, "effort": "low"} if field == "output_config" else form}
    prompt("messages", max_tokens=5, messages=[{"role": "user", "content": "q"}], **given)
    assert '"ok"' in prompt.prepared.sampling.grammar
    for wrong in ({"type": "xml"}, {"type": "json_schema"}):
        given = {field: {"format": wrong} if field == "output_config" else wrong}
        with pytest.raises(RequestError):
            prompt("messages", max_tokens=5, messages=[{"role": "user", "content": "q"}], **given)


def test_calls_of_free_text_are_answered_as_such(client):
    made = client.responses.create(model="m", input=f"{SAYS_PATCH}<|end|>", tools=[PATCH], max_output_tokens=900)
    assert [(item.type, item.name, item.input) for item in made.output] == [
        ("custom_tool_call", "patch", '*** "a"\n+ b')
    ]
    given = {"model": "m", "input": f"{SAYS_PATCH}<|end|>", "tools": [PATCH], "max_output_tokens": 900, "stream": True}
    found = list(client.responses.create(**given))
    assert [e.delta for e in found if e.type == "response.custom_tool_call_input.delta"] == ['*** "a"\n+ b']
    assert [e.input for e in found if e.type == "response.custom_tool_call_input.done"] == ['*** "a"\n+ b']
    assert found[-1].response.output[0].type == "custom_tool_call"
    messages = [{"role": "user", "content": f"{SAYS_PATCH}<|end|>"}]
    chat = client.chat.completions.create(model="m", messages=messages, tools=[{"type": "custom", "custom": PATCH}])
    call = chat.choices[0].message.tool_calls[0]
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", '*** "a"\n+ b')


@pytest.mark.parametrize(
    "arguments, text",
    [('{"input": "a\\nb"}', "a\nb"), ('{"input": "a\\n', "a\n"), ('{"input": "a\\u00', "a"), ("{", "{")],
)
def test_free_text_that_is_cut_off_is_given_as_far_as_it_came(arguments, text):
    assert custom_text(arguments) == text


def test_the_first_delta_of_a_call_has_its_name_and_no_arguments(client):
    said = ANSWER.replace('{"city": "Rome"}', "{}", 1)
    messages = [{"role": "user", "content": said}]
    chunks = client.chat.completions.create(
        model="m", messages=messages, tools=TOOLS, max_tokens=len(said), stream=True
    )
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    firsts = [delta for delta in deltas if delta.function.name]
    assert [(first.index, first.function.arguments) for first in firsts] == [(0, ""), (1, "")] and all(
        f.id for f in firsts
    )
    texts = ["".join(d.function.arguments for d in deltas if d.index == index) for index in (0, 1)]
    assert [json.loads(text) for text in texts] == [{}, {"city": "Rome"}]


@pytest.mark.parametrize("name", NAMES)
def test_paths_that_are_not_served_say_so_whatever_is_sent(served, name):
    path = name.replace("{name:path}", "x")
    multipart = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    for more in (multipart, {"json": {}}, {}):
        answer = httpx.post(f"{served[1].url}{path}", **more)
        assert answer.status_code == 404 and "is not supported by this server: " in answer.text


@pytest.mark.parametrize("field", ["grammar", "guided_grammar", "guided_regex", "guided_choice", "guided_json"])
def test_a_grammar_of_five_megabytes_is_refused_by_its_length(prompt, field):
    text = 'root ::= "a"\n' + "# comment of the grammar\n" * 200_000
    long = {"guided_choice": [text], "guided_json": {"enum": [text]}}.get(field, text)
    begun = time.process_time()
    with pytest.raises(RequestError, match="characters as a grammar; at most 262144"):
        prompt("completion", prompt="a", **{field: long})
    assert time.process_time() - begun < 1.0  # it took 15 s

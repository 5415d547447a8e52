"""What is read of a data file: its kind, the keys of a record, the order of roles, and tools as serving has them."""

import json

import pytest

from ckdist.engine.load_model import BUNDLED
from ckdist.errors import ConfigError, RequestError
from ckdist.serve.requests.prepare import apply_template
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.chat_template import ChatTemplate
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.train.data.data_files import find_files
from ckdist.train.data.documents import read_documents
from ckdist.train.data.records import BadLine, Document
from ckdist.train.data.token_cache import open_cache
from ckdist.train.data.turns import turns_of

USER, ANSWER = {"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TEMPLATE = (
    "{% for tool in tools or [] %}# Tools {{ tool | tojson }}{% endfor %}{% for m in messages %}"
    "<|{{ m.role }}|>{{ m.content }}{{ m.reasoning_content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "12 C"}


def read(tmp_path, name: str, data: str) -> list[Document | BadLine]:
    (tmp_path / name).write_text(data)
    return list(read_documents(tmp_path / name, "text"))


def refused(tmp_path, record: object) -> str:
    (bad,) = read(tmp_path, "a.jsonl", json.dumps(record))
    assert isinstance(bad, BadLine) and bad.where.endswith("a.jsonl:1"), bad
    return bad.why


@pytest.mark.parametrize(
    "data, lines",
    [
        ('[{"text": "one"}, {"text": "two"}]', [1, 1]),
        ('[\n  {"text": "one"},\n  {"text":\n "two"}\n]\n', [2, 3]),
        ('\n{"text": "one"}\n{"text": "two"}\n', [2, 3]),
        ('\ufeff[{"text": "one"},{"text": "two"}]', [1, 1]),
    ],
)
def test_a_json_file_is_records_and_never_text(tmp_path, data, lines):
    for name in ("a.json", "a.JSON"):
        documents = read(tmp_path, name, data)
        assert [document.text for document in documents] == ["one", "two"]
        assert [int(document.where.rpartition(":")[2]) for document in documents] == lines


def test_a_json_file_of_one_record_or_of_none(tmp_path):
    assert [document.text for document in read(tmp_path, "a.json", '{\n "text": "one"\n}')] == ["one"]
    assert read(tmp_path, "b.json", "[]") == [] == read(tmp_path, "c.json", "")


@pytest.mark.parametrize(
    "name, data, said",
    [
        ("a.json", '[{"text": "one"}\n {"text": "two"}]', 'a.json:2 has \'{"text": "two"}]\' where a comma or the end'),
        ("a.json", '[{"text": "one"},\n {"text": ]', "a.json:2 is not JSON: "),
        ("a.json", '[{"text": "one"}] x', "has 'x' after its list"),
        ("a.db", "text\none\n", "a.db is no text, and .db is not read: give .jsonl, .json, .csv, .parquet or text"),
        ("a.csv", "text,text\na,b\n", "a.csv has two columns of one name"),
        ("a.csv", "body\na\n", "a.csv has no text in 'text' and no chat; its keys are body"),
        ("a.csv", 'text\na\n"b\n', "a.csv:3 is not CSV"),
        ("a.jsonl.gz", "x", "a.jsonl.gz is no text, and .gz is not read"),
        ("a.ARROW", "x", "a.ARROW is no text, and .arrow is not read"),
        ("a.bin", "ab\0c", "a.bin is no text: it has a byte 0"),
    ],
)
def test_data_with_a_structure_is_never_read_as_text(tmp_path, name, data, said):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, name, data)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "record, said",
    [
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "its keys are prompt, chosen, rejected: train preferences with",
        ),
        ({"body": "a"}, "has no text in 'text' and no chat; its keys are body: give messages, conversations,"),
        (
            {"conversations": [{"from": "humann", "value": "a"}]},
            "conversations[0].from ('humann') must be one of human",
        ),
        ({"conversations": [{"from": "human", "value": 3}]}, "conversations[0].value must be a text, not a number"),
        ({"conversations": [{"from": "human", "value": "Hi."}]}, "its last message has the role 'user'"),
        ({"instruction": "a", "output": ["b"]}, "output must be a text, not a list"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "history must be a list of pairs"),
        ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, "prompt has an answer of the assistant's, which"),
        ({}, "its keys are none"),
        ([1], "is a list, not an object"),
    ],
)
def test_other_forms_are_refused_with_their_keys(tmp_path, record, said):
    assert said in refused(tmp_path, record)


@pytest.mark.parametrize(
    "record, roles, said",
    [
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
            ["system", "user", "assistant"],
            "b",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": '{"name": "weather", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "12 C"},
                    {"from": "gpt", "value": "b"},
                ],
                "tools": json.dumps([TOOL]),
            },
            ["user", "assistant", "tool", "assistant"],
            "b",
        ),
        ({"conversation": [USER, ANSWER]}, ["user", "assistant"], "yes"),
        ({"instruction": "a", "input": "", "output": "b", "text": "other"}, ["user", "assistant"], "b"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, ["user", "assistant"] * 2, "b"),
        ({"prompt": "a", "completion": "b"}, ["user", "assistant"], "b"),
        ({"prompt": [USER], "completion": [ANSWER]}, ["user", "assistant"], "yes"),
        ({"question": "a", "answer": "b"}, ["user", "assistant"], "b"),
    ],
)
def test_other_forms_are_read_as_chats(tmp_path, record, roles, said):
    (document,) = read(tmp_path, "a.jsonl", json.dumps(record))
    assert isinstance(document, Document) and document.messages, document
    assert [message["role"] for message in document.messages] == roles
    assert document.messages[-1]["content"] == said and len(document.tools) == ("tools" in record)


def test_an_input_of_alpacas_stands_under_the_instruction(tmp_path):
    (document,) = read(tmp_path, "a.jsonl", json.dumps({"instruction": "a", "input": "b", "output": "c"}))
    assert isinstance(document, Document) and (document.messages or [{}])[0]["content"] == "a\n\nb"


def test_a_json_object_with_one_list_of_records_is_that_list(tmp_path):
    data = '{"version": "1 [", "meta": {"data": [1]},\n"data": [{"text": "one"},\n{"text": "two"}], "n": 2}'
    documents = read(tmp_path, "a.json", data)
    assert [(d.where[-1], d.text) for d in documents if isinstance(d, Document)] == [("2", "one"), ("3", "two")]


def test_a_csv_file_is_rows_with_the_columns_of_its_first(tmp_path):
    rows = 'prompt,id,completion\n"a,\nb",1,c\n,2,d\n\ne,3,f,g\n'
    first, second, third = read(tmp_path, "a.csv", rows)
    assert isinstance(first, Document) and first.where.endswith("a.csv:2") and first.form == "prompt and completion"
    assert [message["content"] for message in first.messages or ()] == ["a,\nb", "c"]
    assert isinstance(second, BadLine) and second.where.endswith(":4") and "has no text in 'text'" in second.why
    assert isinstance(third, BadLine) and third.where.endswith(":6") and third.why.startswith("has 4 cells")
    (chat,) = read(tmp_path, "a.tsv", "messages\n" + '"' + json.dumps([USER, ANSWER]).replace('"', '""') + '"\n')
    assert isinstance(chat, Document) and chat.messages == [USER, ANSWER]


def test_a_folder_is_its_records_without_other_splits(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("README.md", "dataset_infos.json", "data/train-0.jsonl", "data/test-0.jsonl", ".hidden.jsonl"):
        (tmp_path / name).write_text("{}")
    said: list[str] = []
    assert [path.name for path in find_files([str(tmp_path)], said.append)] == ["train-0.jsonl"]
    assert said[0].endswith("left out as another split: 1 file, as test-0.jsonl")
    (tmp_path / "data" / "train-0.jsonl").unlink()
    (tmp_path / "a.txt").write_text("a")
    assert [path.name for path in find_files([str(tmp_path)])] == ["a.txt"]
    with pytest.raises(ConfigError, match="has no file to train on"):
        find_files([str(tmp_path / "data")])


@pytest.mark.parametrize(
    "messages, said",
    [
        ([USER, {"role": "asistant", "content": "yes"}, ANSWER], "messages[1].role ('asistant') must be one of system"),
        ([ANSWER, USER, ANSWER], "messages[0] is an answer, but no question comes before it"),
        ([USER, ANSWER, ANSWER], "messages[2] is an answer, but another answer comes before it"),
        ([USER, ANSWER, USER], "its last message has the role 'user'; it must be the assistant's answer"),
        (
            [USER, {"role": "system", "content": "s"}, ANSWER],
            "messages[1] has the role 'system', which may only come",
        ),
        ([{"role": "system", "content": "s"}] * 2 + [USER, ANSWER], "messages begin with the roles system, system"),
        ([{"role": "system", "content": "s"}, ANSWER], "messages[1] is an answer, but no question comes"),
        ([USER, RESULT, ANSWER], "messages[1] has the role 'tool', but no tool call comes before it"),
        ([USER, ANSWER, RESULT, ANSWER], "messages[2] has the role 'tool', but no tool call comes before it"),
        ([USER, CALLED, {**RESULT, "tool_call_id": "c2"}, ANSWER], "tool_call_id ('c2') is the id of no call before"),
        ([USER, {"role": "assistant", "content": ""}], "messages[1] is an empty answer"),
        ([USER, {**ANSWER, "weight": 0}], "messages[1].weight (0) is not read; every answer is learned"),
        ([{**USER, "tool_calls": [CALL]}, ANSWER], "messages[0] has tool_calls, but the role 'user'"),
        ([USER, {**ANSWER, "function_call": {"name": "f"}}], "messages[1].function_call is not read"),
        ([USER, {**CALLED, "tool_calls": [{"name": "f"}]}], "messages[1].tool_calls[0] needs a function with a name"),
        ([{"role": "user", "content": [{"type": "image_url"}]}, ANSWER], "has type 'image_url'; only 'text'"),
        ([USER, {**ANSWER, "content": "\ud800"}], "a text is not Unicode"),
        ([], "messages must be a list of messages, not empty"),
    ],
)
def test_a_chat_that_would_teach_the_wrong_thing_is_refused(tmp_path, messages, said):
    assert said in refused(tmp_path, {"messages": messages})


@pytest.mark.parametrize(
    "more, said",
    [
        ({"tools": "{}"}, "tools must be a list, not an object"),
        ({"tools": "["}, "tools is a text that is not JSON"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] has type 'web_search'"),
        ({"tools": [TOOL, TOOL]}, "tools has two tools of one name"),
        ({"functions": [{"name": "f"}]}, "functions is not read in training"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs is not read in training"),
    ],
)
def test_what_changes_a_prompt_is_read_or_refused_by_name(tmp_path, more, said):
    assert said in refused(tmp_path, {"messages": [USER, ANSWER], **more})


def test_roles_that_a_server_takes_are_taken(tmp_path):
    system, developer = ({"role": role, "content": "s"} for role in ("system", "developer"))
    for messages in (
        [system, USER, ANSWER],
        [developer, USER, ANSWER, USER, ANSWER],
        [system, developer, USER, USER, ANSWER],
        [USER, CALLED, RESULT, ANSWER],
        [USER, CALLED],
    ):
        (document,) = read(tmp_path, "a.jsonl", json.dumps({"messages": messages}))
        assert isinstance(document, Document) and [m["role"] for m in document.messages or ()] == [
            m["role"] for m in messages
        ]


@pytest.mark.parametrize(
    "source",
    [
        None,  # a template without a place for tools
        TEMPLATE,
    ],
)
def test_training_learns_an_answer_behind_the_prompt_that_a_server_makes(tmp_path, source):
    """Tools, calls with arguments as text, and thoughts under another name."""
    tokenizer = load_tokenizer(BUNDLED)
    if source:
        object.__setattr__(tokenizer, "chat_template", ChatTemplate(source))
    record = {"messages": [USER, CALLED, RESULT, {**ANSWER, "thinking": "hm"}], "tools": [TOOL]}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    write = lambda chats: [turns_of(*chat, tokenizer) for chat in chats]
    cache = open_cache(tmp_path / "cache", [tmp_path / "a.jsonl"], tokenizer, "text", "error", write)
    assert cache.where(0) == f"{tmp_path / 'a.jsonl'}:1"
    body = {**record, "messages": record["messages"][:-1]}
    prompt = apply_template(body, tokenizer, ModelFacts("m", 4096, 4096))["prompt"]
    text = tokenizer.decode(cache.tokens[cache.starts[-2] :].tolist(), skip_special=False)
    assert text.startswith(prompt) and "weather" in prompt and text[len(prompt) :].startswith("yes")


def test_a_row_of_a_table_has_no_nulls_of_other_rows(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [USER, CALLED, RESULT, ANSWER], "tools": [TOOL | {"x": 1}]}, {"messages": [USER, ANSWER]}]
    # A struct without fields cannot be written.
    rows[0]["tools"][0]["function"] = {"name": "weather"}
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    called, plain = read_documents(tmp_path / "a.parquet", "text")
    assert isinstance(called, Document) and isinstance(plain, Document)
    assert plain.messages == [USER, ANSWER] and plain.tools == () and len(called.tools) == 1


def test_a_file_that_is_named_twice_is_read_once_and_said(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to("a.txt")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    assert [str(path) for path in find_files(["a.txt", "*.txt", str(tmp_path / "a.txt")], said.append)] == ["a.txt"]
    assert said[0] == "a.txt is named twice, and is read once"
    assert said[1] == "b.txt is named twice (as a.txt too), and is read once" and len(said) == 3


def test_a_control_token_in_a_text_is_refused_since_a_server_reads_it_as_text():
    tokenizer = load_tokenizer(BUNDLED)
    for messages in ([{**USER, "content": "What is <|end|>?"}, ANSWER], [USER, {**ANSWER, "content": "a<|user|>"}]):
        with pytest.raises(RequestError, match=r"its text has the control token '<\|(end|user)\|>', which a server"):
            turns_of(messages, (), tokenizer)
    assert turns_of([USER, {**ANSWER, "content": "a < b | c > d"}], (), tokenizer)

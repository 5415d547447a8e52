"""Calls of tools: found in templates, read out of answers however these are cut, and enforced by grammars."""

import functools
import json
import random

import jsonschema
import pytest

from ckdist.serve.chat_message import parser_of
from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.parsers.llama3 import python_call
from ckdist.serve.requests.answer_form import NAMED
from ckdist.tokens.chat_template import ChatTemplate
from ckdist.tokens.grammar import check_grammar, quoted
from ckdist.tokens.tool_format import HERMES, ToolFormat
from ckdist.tokens.tool_grammar import ToolGrammar
from tests.support import tool_templates as templates
from tests.support.answers import SCHEMAS, TYPES, always, follows, read, written

THINK = ("<think>", "</think>")
TWO = {"get": {"city": "São {P}", "n": 3}, "f": {}}

# A template, what is found in it, and an answer with the calls of TWO.
FORMS = {
    "tagged json": (
        templates.TAGGED_JSON,
        ToolFormat("object", "\n<tool_call>\n", "", "\n</tool_call>"),
        ('<tool_call>\n{"name": "get", "arguments": {"city": "São {P}", "n": 3}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "f"}</tool_call>'),
    ),
    "bare json": (
        templates.BARE_JSON,
        ToolFormat("object", arguments_key="parameters"),
        '{"name": "get", "parameters": {"city": "São {P}", "n": 3}}\n{"name": "f", "parameters": {}}',
    ),
    "listed json": (
        templates.LISTED_JSON,
        ToolFormat("object", section_begin="[TOOL_CALLS] [", section_end="]", separator=", "),
        ('[TOOL_CALLS][{"name": "get", "arguments": {"city": "São {P}", "n": 3}, "id": "a"}, '
        '{"name": "f", "arguments": "{}"}]'),
    ),
    "named json": (
        templates.NAMED_JSON,
        ToolFormat("json", "[TOOL_CALLS]", "[ARGS]"),
        '[TOOL_CALLS]get[ARGS]{"city": "São {P}", "n": 3}[TOOL_CALLS]f[ARGS]{}',
    ),
    "sectioned json": (
        templates.SECTIONED_JSON,
        ToolFormat("json", "<|call_begin|>", "<|sep|>", "<|call_end|>", "<|calls_begin|>", "<|calls_end|>"),
        ('<|calls_begin|><|call_begin|>get<|sep|>{"city": "São {P}", "n": 3}<|call_end|>'
        "<|call_begin|>f<|sep|>{}<|call_end|><|calls_end|>"),
    ),
    "tagged arguments": (
        templates.TAGGED_ARGUMENTS,
        ToolFormat(
            "tagged", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", separator="\n",
            key_begin="<parameter=", key_end=">\n", value_end="\n</parameter>\n",
        ),
        ("<tool_call>\n<function=get>\n<parameter=city>\nSão {P}\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    ),
    "keys and values": (
        templates.KEYS_AND_VALUES,
        ToolFormat(
            "tagged", "\n<tool_call>", "\n", "\n</tool_call>",
            key_begin="<arg_key>", key_end="</arg_key>\n<arg_value>", value_end="</arg_value>\n",
        ),
        ("<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>São {P}</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>"),
    ),
    "fenced json": (
        templates.FENCED_JSON,
        ToolFormat(
            "json", "<|call_begin|>function<|sep|>", "```json", "```<|call_end|>", "<|calls_begin|>", "<|calls_end|>"
        ),
        ('<|calls_begin|><|call_begin|>function<|sep|>get\n```json\n{"city": "São {P}", "n": 3}\n```<|call_end|>\n'
        "<|call_begin|>function<|sep|>f\n```json\n{}\n```<|call_end|><|calls_end|>"),
    ),
    "invoked": (
        templates.INVOKED,
        ToolFormat(
            "tagged", '<invoke name="', '">', "</invoke>", "<calls>", "</calls>",
            key_begin='<parameter name="', key_end='">', value_end="</parameter>",
        ),
        ('<calls>\n<invoke name="get">\n<parameter name="city">São {P}</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</calls>'),
    ),
    "token and list": (
        templates.TOKEN_AND_LIST,
        ToolFormat("object", section_begin="<|tool_call|>[", section_end="]", separator=", "),
        ('<|tool_call|>[{"name": "get", "arguments": {"city": "São {P}", "n": 3}}, '
        '{"name": "f", "arguments": {}}]'),
    ),
    "numbered json": (
        templates.NUMBERED_JSON,
        ToolFormat("json", "[TOOL_CALLS]", "[CALL_ID]", id_end="[ARGS]"),
        ('[TOOL_CALLS]get[CALL_ID]a1b2c3d4e[ARGS]{"city": "São {P}", "n": 3}'
        "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}"),
    ),
    "no tools": (
        templates.NO_TOOLS,
        HERMES,
        ('<tool_call>\n{"name": "get", "arguments": {"city": "São {P}", "n": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f"}\n</tool_call>'),
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        NAMED["<|tool_calls_section_begin|>"],
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0'
        '<|tool_call_argument_begin|>{"city": "São {P}", '
        '"n": 3}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("source, wanted, answer", FORMS.values(), ids=FORMS)
def test_a_format_is_found_and_read(source, wanted, answer):
    found = wanted if wanted.kind == "kimi" else ChatTemplate(source).tool_format()
    assert strip(found) == strip(wanted)
    content, reasoning, calls = always(AnswerForm(THINK, False, found, TYPES), answer)
    assert (content.strip(), reasoning) == ("", "")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == list(TWO.items())
    if found.call_begin.strip() or found.section_begin.strip():
        text = f"<think>why?</think>\n\nLet me see.\n{answer}"
        assert always(AnswerForm(THINK, False, found, TYPES), text) == ("Let me see.", "why?", calls)


def test_ids_of_the_models_own():
    form = AnswerForm(None, False, ChatTemplate(templates.NUMBERED_JSON).tool_format(), TYPES)
    parser = parser_of(form)
    deltas = parser.step(FORMS["numbered json"][2]) + parser.flush()
    assert [delta.id for delta in deltas if delta.name] == ["a1b2c3d4e", "123456789"]


def strip(form: ToolFormat):
    return [value.strip() if isinstance(value, str) else value for value in vars(form).values()]


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("plain <b and {", ("plain <b and {", "", [])),
        ("<think>a <b</think>\n\nx < 3 <tool", ("x < 3 <tool", "a <b", [])),
        ("<tool_call>\nnot JSON</tool_call> x", ("<tool_call>\nnot JSON</tool_call> x", "", [])),
        ('<tool_call>{"arguments": {}}</tool_call>', ('<tool_call>{"arguments": {}}</tool_call>', "", [])),
        ('<tool_call>{"name": "get", "arguments": {"ci', ("", "", [["get", '{"ci']])),
        ('a\n\n<tool_call>{"name": "f"}</tool_call>\nb ', ("a\n\nb", "", [["f", "{}"]])),
        ("<think>never ends", ("", "never ends", [])),
        ("", ("", "", [])),
    ],
)
def test_what_is_no_call_is_content(text, wanted):
    assert always(AnswerForm(THINK, False, HERMES, TYPES), text) == wanted


def test_reasoning_that_the_prompt_has_begun_and_calls_that_are_too_many():
    assert always(AnswerForm(THINK, True), "I see</think>\nyes") == ("yes", "I see", [])
    two = FORMS["no tools"][2]
    assert [name for name, _ in always(AnswerForm(None, False, HERMES, TYPES, most_calls=1), two)[2]] == ["get"]


def test_bare_json_is_a_call_only_of_a_tool():
    form = AnswerForm(None, False, ChatTemplate(templates.BARE_JSON).tool_format(), TYPES)
    for text in ('{"name": "John", "age": 3}', '{"a": [1, 2]} and more', 'Say {"name": "get"}', "{"):
        assert always(form, text) == (text, "", [])


def test_llama_3_calls_in_python():
    form = AnswerForm(None, False, ToolFormat("llama3", arguments_key="parameters"), {**TYPES, "python": {}})
    assert always(form, '<|python_tag|>get.call(city="Rome", n=3)')[2] == [["get", '{"city": "Rome", "n": 3}']]
    assert always(form, "<|python_tag|>print(1)\n")[2] == [["python", '{"code": "print(1)"}']]
    assert always(form, '<|python_tag|>{"name": "f", "parameters": {}}')[2] == [["f", "{}"]]
    assert always(form, '{"name": "f", "parameters": {}}')[2] == [["f", "{}"]]
    for hostile in ("get(", "get(x=__import__('os'))", "get(**{})" * 9999, "(" * 9999, "get(1)", "get(x=1e999)"):
        python_call(hostile)


@functools.cache
def text_of(grammar, seed):
    return written(grammar, random.Random(seed))


@pytest.mark.parametrize("name", FORMS)
def test_what_follows_the_grammar_of_calls_is_read_as_calls_that_validate(name):
    source, wanted, _ = FORMS[name]
    form = wanted if wanted.kind == "kimi" else ChatTemplate(source).tool_format()
    types = {tool: {key: item["type"] for key, item in s["properties"].items()} for tool, s in SCHEMAS.items()}
    grammar = ToolGrammar(form, quoted, frozenset(SCHEMAS)).lark(SCHEMAS, True, None)
    check_grammar(grammar)
    texts = [text for seed in range(12) if (text := text_of(grammar, seed)) is not None]
    assert texts
    for text in texts:
        content, _, calls = read(AnswerForm(None, False, form, types), text)
        assert calls and not content.strip(), text
        for tool, arguments in calls:
            if form.kind != "tagged" or tool != "get":  # a text without JSON's marks may have any length
                jsonschema.validate(json.loads(arguments), SCHEMAS[tool])


@pytest.mark.parametrize("name", FORMS)
def test_in_an_answer_that_is_free_calls_validate_once_they_begin(name):
    source, wanted, _ = FORMS[name]
    form = wanted if wanted.kind == "kimi" else ChatTemplate(source).tool_format()
    rules = ToolGrammar(form, quoted, frozenset(SCHEMAS))
    free = rules.lark_in_text(SCHEMAS, True, THINK, False)
    check_grammar(free)
    call = next(text for seed in range(50) if (text := text_of(rules.lark(SCHEMAS, True, None), seed)))
    texts = ["", "I look.", "a < b { x", '{"name": "Anna"}', "<think>Should I?</think>\n\nNo."]
    marked = form.call_begin.strip() or form.section_begin.strip()
    befores = ["", "I look.\n", f"<think>I {call}?</think>\n"] if marked else ["", "<think>Yes.</think>"]
    for text in [*texts, *(before + call.lstrip() for before in befores)]:
        assert follows(free, text), text
    wrong = [call.replace('"city"', '"town"').replace("city", "town"), call.replace("get", "put"), call[:-1]]
    wrong += [call.replace("note", "tone"), call.replace("tags", "gats"), call + " and more"]
    refused = [text for text in wrong if text != call and not follows(free, text)]
    assert len(refused) >= 3 and not follows(free, f"<think>never ends {call}")
    thought = rules.lark_in_text(SCHEMAS, True, THINK, True)
    assert follows(thought, f"Hm.</think>\n\n{call.lstrip()}") and not follows(thought, f"Hm.</think>\n{wrong[-1]}")
    once = rules.lark_in_text(SCHEMAS, False, None, False)
    assert follows(once, "No.") and follows(once, rules_call(form))


def rules_call(form: ToolFormat) -> str:
    """One call that validates."""
    grammar = ToolGrammar(form, quoted, frozenset(SCHEMAS)).lark(SCHEMAS, False, None)
    return next(text.lstrip() for seed in range(50) if (text := text_of(grammar, seed)))

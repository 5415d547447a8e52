# ruff: noqa: RUF001 - DeepSeek's marks are written with other characters than ASCII's
"""Reasoning and calls of the published mixtures of experts: found by their templates' forms, read out of answers as the
models write them, and written again in the next turn. gpt-oss has its own (test_harmony).
"""

import json
from dataclasses import dataclass

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ckdist.serve.chat_message import parser_of
from ckdist.serve.requests.answer_form import answer_form, answer_grammar
from ckdist.serve.requests.tools import Tools
from ckdist.tokens.chat_template import ChatTemplate
from ckdist.tokens.tokenizer_folder import load_tokenizer
from tests.support import reasoning_templates as templates
from tests.support.answers import SCHEMAS, always, follows

TOOLS = Tools(tuple({"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()))
GET, NOTE = {"city": "Zürich", "n": 3}, {"tags": ["a"], "deep": {"x": True}}
GET_TEXT, NOTE_TEXT = json.dumps(GET, ensure_ascii=False), json.dumps(NOTE)


@dataclass(frozen=True)
class Family:
    """`special`: marks that are control tokens. `calls`: of `get` and of `note`, as the model writes them.
    `prompts`: variables of the template, and whether the prompt that they make has begun the reasoning.
    """

    template: str
    special: tuple[str, ...]
    calls: str
    prompts: tuple[tuple[dict[str, bool], bool], ...]


FAMILIES = {
    "qwen3moe": Family(
        templates.QWEN3,
        ("<|im_start|>", "<|im_end|>"),
        f'<tool_call>\n{{"name": "get", "arguments": {GET_TEXT}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "note", "arguments": {NOTE_TEXT}}}\n</tool_call>',
        (({}, False), ({"enable_thinking": False}, False)),
    ),
    "qwen3moe that always thinks": Family(
        templates.QWEN3.replace(
            "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}", "<think>\n"
        ),
        ("<|im_start|>", "<|im_end|>"),
        f'<tool_call>\n{{"name": "get", "arguments": {GET_TEXT}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "note", "arguments": {NOTE_TEXT}}}\n</tool_call>',
        (({}, True),),
    ),
    "glm4moe": Family(
        templates.GLM45,
        ("<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>"),
        "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>note\n<arg_key>tags</arg_key>\n"
        '<arg_value>["a"]</arg_value>\n<arg_key>deep</arg_key>\n<arg_value>{"x": true}</arg_value>\n</tool_call>',
        (({}, False), ({"enable_thinking": False}, False)),
    ),
    "glm5_next": Family(
        templates.GLM53,
        ("<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>"),
        "<tool_call>get<arg_key>city</arg_key><arg_value>Zürich</arg_value><arg_key>n</arg_key><arg_value>3</arg_value>"
        "</tool_call><tool_call>note<arg_key>tags</arg_key>"
        '<arg_value>["a"]</arg_value><arg_key>deep</arg_key><arg_value>{"x": true}</arg_value></tool_call>',
        (({}, True), ({"clear_thinking": True}, True), ({"reasoning_effort": "low"}, True)),
    ),
    "minimax_m2": Family(
        templates.MINIMAX_M2,
        ("]~!b[", "]~b]", "[e~["),
        '<minimax:tool_call>\n<invoke name="get">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="n">3</parameter>\n</invoke>\n<invoke name="note">\n<parameter name="tags">["a"]</parameter>\n'
        '<parameter name="deep">{"x": true}</parameter>\n</invoke>\n</minimax:tool_call>',
        (({}, True),),
    ),
    "kimi_k2": Family(
        templates.KIMI_K2,
        ("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{GET_TEXT}"
        f"<|tool_call_end|><|tool_call_begin|>functions.note:1<|tool_call_argument_begin|>{NOTE_TEXT}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        (({}, False),),
    ),
    "deepseek_v3": Family(
        templates.DEEPSEEK_V31,
        ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{GET_TEXT}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>note<｜tool▁sep｜>{NOTE_TEXT}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (({}, False), ({"thinking": True}, True)),
    ),
}
USER = {"role": "user", "content": "q"}


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory):
    """A family, and a tokenizer of bytes and its control tokens with its template."""
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("family")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(family.special))
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": family.template}))
    return family, load_tokenizer(folder)


def forms(family, tokenizer, tools=TOOLS):
    """Of every prompt that the template makes."""
    for variables, begun in family.prompts:
        prompt = tokenizer.chat_template.render([USER], tools=list(tools.given), **variables)
        form = answer_form(tokenizer, prompt, tools, True)
        assert form is not None and form.think == ("<think>", "</think>") and form.in_thought == begun, variables
        yield form


def test_an_answer_is_read(served):
    family, tokenizer = served
    for form in forms(family, tokenizer):
        begin = "" if form.in_thought else "\n<think>"
        text = f"{begin}Which <city>?\n</think>\n\nI look.\n{family.calls}"
        content, reasoning, calls = always(form, text)
        assert (content, reasoning.strip()) == ("I look.", "Which <city>?")
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get", GET), ("note", NOTE)]
        assert always(form, f"{begin}Hm.</think>3 < 4")[:2] == ("3 < 4", "Hm.")
        if not form.in_thought:
            assert always(form, "No thought.") == ("No thought.", "", [])
    for form in forms(family, tokenizer, Tools()):
        assert form.calls is None


def test_calls_are_written_again_as_the_model_wrote_them(served):
    """With the ids that clients were given; reasoning of the last turn as well, where the model's template has it."""
    family, tokenizer = served
    form = next(forms(family, tokenizer))
    parser = parser_of(form)
    text = ("" if form.in_thought else "<think>") + f"Hm.</think>I look.\n{family.calls}"
    begun = [delta for delta in parser.step(text) + parser.flush() if delta.name]
    calls = [
        {"id": delta.id or f"call{delta.call}", "type": "function",
         "function": {"name": delta.name, "arguments": arguments}}
        for delta, arguments in zip(begun, (GET_TEXT, NOTE_TEXT), strict=True)
    ]  # fmt: skip
    said = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls}
    result = {"role": "tool", "content": "21", "tool_call_id": calls[0]["id"]}
    prompt = tokenizer.chat_template.render([USER, said, result], tools=list(TOOLS.given))
    assert family.calls in prompt and "I look." in prompt and "21" in prompt
    assert "Hm." in prompt or "reasoning_content" not in family.template


def test_kimis_template_names_tools_by_ids():
    """Those that others have made become the model's own, in results too."""
    template = ChatTemplate(templates.KIMI_K2)
    call = lambda id, name: {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("toolu_1", "get"), call("functions.note:7", "note")],
    }
    results = [
        {"role": "tool", "content": text, "tool_call_id": id} for id, text in (("toolu_1", "21"), ("other", "x"))
    ]
    prompt = template.render([USER, said, *results, said], tools=list(TOOLS.given))
    assert template.traits().ids_name_tools and "toolu_1" not in prompt
    ids = ["functions.get:0", "functions.note:7", "functions.get:2", "functions.note:7"]
    assert [part.partition("<|")[0] for part in prompt.split("<|tool_call_begin|>")[1:]] == ids
    assert "## functions.get:0\n21" in prompt and "## other\nx" in prompt
    others = (family.template for family in FAMILIES.values() if family.template != templates.KIMI_K2)
    assert not any(ChatTemplate(source).traits().ids_name_tools for source in others)


def test_calls_that_must_come_follow_the_models_form(served):
    family, tokenizer = served
    for form in forms(family, tokenizer):
        grammar = answer_grammar(tokenizer, form, Tools(TOOLS.given, must_call=True), None)
        mark = form.calls.section_begin + form.calls.call_begin
        begin = "Hm.</think>\n\n\n" if form.in_thought else mark[: len(mark) - len(mark.lstrip())]
        assert follows(grammar, begin + family.calls.replace("Zürich", "Rome"))
        assert not follows(grammar, begin + family.calls.replace("note", "other"))
        assert not follows(grammar, begin + "I look.")

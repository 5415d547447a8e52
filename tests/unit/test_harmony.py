"""OpenAI's harmony format: messages in channels, read however they are cut, and the grammar of what must come."""

import json
import random

import jsonschema
import pytest
import tokenizers
from msgspec import msgpack
from tokenizers import decoders, models, pre_tokenizers

from ckdist.engine.grammars import Grammars
from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.requests.answer_form import answer_form, answer_grammar
from ckdist.serve.requests.tools import Tools
from ckdist.tokens.grammar import check_grammar, json_schema_grammar, quoted
from ckdist.tokens.harmony import MARKS, is_harmony
from ckdist.tokens.harmony_grammar import harmony_grammar
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.tokens.tool_format import ToolFormat
from tests.support.answers import SCHEMAS, TYPES, always, read, written

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{{ m.thinking }}{% endif %}{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}"
    "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ '// ' + t.function.description }}{{ t.function.name }}{% endfor %}"
    "{% if false %}<|start|>assistant<|channel|>final<|message|>{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TOOLS = Tools(tuple({"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()))
FORM = AnswerForm(("a", "b"), False, ToolFormat("harmony"), TYPES, channels="")
CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "Rome"}'
THOUGHT = "<|channel|>analysis<|message|>A < B?<|end|>"
FINAL = "<|channel|>final<|message|>Yes, <b>."
CASES = {
    "thought and answer": (f"{THOUGHT}<|start|>assistant{FINAL}<|return|>", ("Yes, <b>.", "A < B?", [])),
    "marks of the end left out": (f"{THOUGHT}<|start|>assistant{FINAL}", ("Yes, <b>.", "A < B?", [])),
    "answer alone": (FINAL, ("Yes, <b>.", "", [])),
    "json answer": ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', ('{"a": 1}', "", [])),
    "thought and call": (f"{THOUGHT}<|start|>assistant{CALL}<|call|>", ("", "A < B?", [["get", '{"city": "Rome"}']])),
    "for whom in front of the channel": (
        f"{THOUGHT}<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{}}",
        ("", "A < B?", [["f", "{}"]]),
    ),
    "for whom at once": (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ("", "", [["f", "{}"]])),
    "word before two calls": (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|><|start|>assistant{CALL}",
        ("I look.", "", [["get", '{"city": "Rome"}']] * 2),
    ),
    "no arguments": ("<|channel|>commentary to=functions.f<|message|> <|call|>", ("", "", [["f", "{}"]])),
    "a tool of ours by its bare name": ("<|channel|>commentary to=get<|message|>{}", ("", "", [["get", "{}"]])),
    "a tool that is built in": ("<|channel|>analysis to=python <|message|>1 + 1<|call|>", ("", "1 + 1", [])),
    "two messages of a kind": (f"{THOUGHT}<|start|>assistant{THOUGHT}", ("", "A < B?\n\nA < B?", [])),
    "another's words": ("<|start|>functions.get to=assistant<|channel|>commentary<|message|>8<|end|>", ("", "", [])),
    "cut in a header": (f"{THOUGHT}<|start|>assistant<|channel|>fi", ("", "A < B?", [])),
    "cut in a call": (CALL[:-3], ("", "", [["get", '{"city": "Rom']])),
    "no message at all": ("Plain < text.", ("Plain < text.", "", [])),
    "a header without end": ("x" * 3000, ("x" * 3000, "", [])),
    "nothing": ("", ("", "", [])),
}  # fmt: skip


@pytest.mark.parametrize("text, wanted", CASES.values(), ids=CASES)
def test_an_answer_is_read(text, wanted):
    assert always(FORM, text) == wanted


def test_without_tools_and_without_reasoning_of_its_own_all_is_content():
    form = AnswerForm(None, False, None, channels="")
    assert always(form, f"{THOUGHT}<|start|>assistant{FINAL}") == ("A < B?\n\nYes, <b>.", "", [])
    assert always(form, CALL) == ('{"city": "Rome"}', "", [])


def test_a_message_that_the_prompt_has_begun_and_calls_that_are_too_many():
    assert always(AnswerForm(("a", "b"), channels="<|channel|>final<|message|>Y"), "es.") == ("es.", "", [])
    assert always(AnswerForm(("a", "b"), channels="<|channel|>analysis<|message|>"), "Hm<|end|>")[1] == "Hm"
    one = AnswerForm(None, False, ToolFormat("harmony"), TYPES, 1, channels="")
    assert len(always(one, CASES["word before two calls"][0])[2]) == 1


def test_what_follows_the_grammar_is_read_as_calls_that_validate():
    grammar = harmony_grammar(quoted, SCHEMAS, frozenset(SCHEMAS), None)
    check_grammar(grammar)
    texts = [text for seed in range(25) if (text := written(grammar, random.Random(seed))) is not None]
    assert len(texts) > 5
    for text in texts:
        _, _, calls = read(FORM, text)
        assert len(calls) == 1, text
        jsonschema.validate(json.loads(calls[0][1]), SCHEMAS[calls[0][0]])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Bytes and the format's marks, of which the folder names one as the end."""
    folder = tmp_path_factory.mktemp("harmony")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([*MARKS, "<|endoftext|>"])
    made.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|return|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def test_an_answer_ends_with_a_call_as_well(tokenizer):
    ends = {tokenizer.token_text(token) for token in tokenizer.eos_token_ids}
    assert ends == {"<|return|>", "<|call|>"} and is_harmony(TEMPLATE) and not is_harmony("<|start|>assistant")


def test_the_form_is_found_by_the_template(tokenizer):
    form = answer_form(tokenizer, "…<|start|>assistant", TOOLS, True)
    assert form is not None and form.channels == "" and form.calls == ToolFormat("harmony")
    assert {tokenizer.token_text(token) for token in form.markers} == set(MARKS)
    assert msgpack.decode(msgpack.encode(form), type=AnswerForm) == form
    begun = answer_form(tokenizer, "…<|start|>assistant<|channel|>final<|message|>Y", Tools(), False)
    assert begun is not None and begun.channels == "<|channel|>final<|message|>Y" and begun.think is begun.calls is None


def test_what_templates_would_fail_on(tokenizer):
    """A text and a thought beside a call, and a tool without a description."""
    calls = [{"id": "a", "type": "function", "function": {"name": "get", "arguments": "{}"}}]
    said = {"role": "assistant", "content": "I look.", "thinking": "Hm.", "tool_calls": calls}
    prompt = tokenizer.chat_template.render([{"role": "user", "content": "q"}, said], tools=list(TOOLS.given))
    assert "Hm.\n\nI look." in prompt and "// " in prompt


def follows(tokenizer, grammar: str, text: str) -> bool:
    """Whether the whole text, with its marks as tokens, is an answer by the grammar, which then may end."""
    matcher = Grammars(tokenizer, tokenizer.vocab_size).find(grammar).future.result(60).deep_copy()
    tokens = tokenizer.encode(text, add_special=False, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_required_calls_and_schemas_stand_in_their_channels(tokenizer):
    form = answer_form(tokenizer, "<|start|>assistant", TOOLS, True)
    required = Tools(TOOLS.given, must_call=True)
    assert answer_grammar(tokenizer, form, TOOLS, None) is None
    call = answer_grammar(tokenizer, form, required, None)
    good = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "Rome", "n": 3}'
    assert follows(tokenizer, call, good) and follows(tokenizer, call, f"{THOUGHT}<|start|>assistant{good}")
    for bad in (FINAL, good.replace("get", "other"), good.replace("3", '"x"'), THOUGHT, good[len("<|channel|>") :]):
        assert not follows(tokenizer, call, bad), bad
    structure = json_schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    plain = answer_form(tokenizer, "<|start|>assistant", Tools(), True)
    for typed in ("", " <|constrain|>json"):
        answer = f'<|channel|>final{typed}<|message|>{{"a": 1}}'
        for given, tools in ((plain, Tools()), (form, TOOLS)):
            grammar = answer_grammar(tokenizer, given, tools, structure)
            assert follows(tokenizer, grammar, answer) and not follows(tokenizer, grammar, answer.replace("1", '"x"'))
            assert follows(tokenizer, grammar, f"{THOUGHT}<|start|>assistant{answer}")
            assert follows(tokenizer, grammar, good) == (tools is TOOLS)
    begun = answer_form(tokenizer, "<|start|>assistant<|channel|>final<|message|>", Tools(), True)
    assert answer_grammar(tokenizer, begun, Tools(), structure) == structure

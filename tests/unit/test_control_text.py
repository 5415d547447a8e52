# ruff: noqa: RUF001 - DeepSeek's marks are written with other characters than ASCII's
"""Control tokens that are written in messages: text to every template, and never a token."""

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tokenizers import AddedToken, models, pre_tokenizers

from ckdist.engine.messages import unpack_tokens
from ckdist.errors import RequestError
from ckdist.serve.requests.prepare import prepare
from ckdist.serve.text_records import EmbeddingWork, ModelFacts, Prepared
from ckdist.tokens.chat_template import CHATML
from ckdist.tokens.control_text import ControlText
from ckdist.tokens.literal_text import LiteralText
from ckdist.tokens.tokenizer_folder import load_tokenizer
from tests.support import reasoning_templates, tool_templates
from tests.support.served import TEMPLATE, write_tokenizer
from tests.unit.test_harmony import TEMPLATE as HARMONY

TEMPLATES = {
    f"{module.__name__.rpartition('.')[2]}.{name}": source
    for module in (tool_templates, reasoning_templates)
    for name, source in vars(module).items()
    if name.isupper() and isinstance(source, str)
} | {"chatml": CHATML, "harmony": HARMONY, "roles": TEMPLATE}
MARK_TEXTS = """<|im_start|> <|im_end|> <|start|> <|end|> <|end_header|> <|eot_id|> <|message|> <|channel|> <|call|>
<|return|>
<|user|> <|assistant|> <|system|> <|observation|> [gMASK] <sop> ]~!b[ ]~b] [e~[ [INST] [/INST] [TOOL_CALLS] [ARGS]
[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] <|User|> <|Assistant|> <|calls_begin|> <|calls_end|> <|end_of_sentence|>
<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <|im_user|> <|im_middle|>
<|im_assistant|> <|im_system|> <|tool_call_begin|> <|tool_call_end|> <|tool_calls_section_begin|> <|start_of_role|>
<|end_of_role|> <|end_of_text|> <|tool_call|> ]b] [e[ <s> </s>"""
MARKS = MARK_TEXTS.split()
FACTS = ModelFacts("m", 1000, 1 << 16)


@pytest.fixture(scope="module")
def bare():
    """A tokenizer of bytes with control tokens, and some that are not."""
    with tempfile.TemporaryDirectory() as folder:
        made = load_tokenizer(write_tokenizer(Path(folder)))
    backend = made.backend.from_str(made.backend.to_str())
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    backend.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>", "<tool_call>")])
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    names = {i: backend.id_to_token(i).encode() for i in range(backend.get_vocab_size())}
    pieces = [made.pieces[i] if i < len(made.pieces) else names[i] for i in range(len(names))]
    return dataclasses.replace(made, backend=backend, special_ids=frozenset(special), pieces=pieces)


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request, bare):
    return with_source(bare, TEMPLATES[request.param])


def with_source(tokenizer, source):
    texts = {"bos_token": "<s>", "eos_token": "</s>"}
    return dataclasses.replace(tokenizer, templates={"default": source}, special_texts=texts)


def chat(say, key=None):
    """Messages and tools in which `say(name)` is the text of every field."""
    key = key or say
    parameters = {"type": "object", "properties": {key("p"): {"type": "string", "description": say("d")}}}
    tool = {"name": "f", "description": say("t"), "parameters": parameters, key("k"): say("v")}
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "f", "arguments": json.dumps({key("a"): say("b")})},
    }
    messages = [
        {"role": "system", "content": say("s")},
        {"role": "user", "content": say("u"), "name": say("n")},
        {"role": "assistant", "content": say("c"), "reasoning_content": say("r"), "tool_calls": [call]},
        {"role": "tool", "content": say("o"), "tool_call_id": "call00001", "name": "f"},
        {"role": "assistant", "content": say("e"), "reasoning_content": say("r")},
        {"role": "user", "content": [{"type": "text", "text": say("x")}, {"type": "text", "text": say("y")}]},
    ]
    return messages, [{"type": "function", "function": tool}]


def controls(tokenizer, messages, tools=None, **options):
    """The control tokens of a prompt."""
    ids = tokenizer.chat_tokens(messages, tools=tools, **options)
    return [tokenizer.token_text(i) for i in ids if i in tokenizer.special_ids]


def chats(say):
    """With tools and without."""
    messages, tools = chat(say)
    yield messages, tools
    yield [message for message in messages if message["role"] != "tool" and "tool_calls" not in message], None


def written(tokenizer, say):
    """Control tokens of every chat that the template takes."""
    found = []
    for messages, tools in chats(say):
        try:
            found.append(controls(tokenizer, messages, tools))
        except RequestError:
            found.append(None)
    return found


def test_no_field_makes_a_control_token(tokenizer):
    expected = written(tokenizer, lambda name: f"{name} text")
    assert any(expected) or tokenizer.chat_template.sources["default"] == TEMPLATE
    among = "".join(f" {mark}\n{mark}text{mark}" for mark in MARKS)
    assert written(tokenizer, lambda name: f"{name}{among}") == expected
    for mark in MARKS:
        assert written(tokenizer, lambda name, mark=mark: mark) == expected, mark


def test_a_prompt_without_control_tokens_in_its_text_is_what_it_was(tokenizer):
    """Text and ids, though its strings begin and end like control tokens."""
    for text in (
        "plain",
        " < b|> [x] </div>\n",
        "<",
        "|>",
        "<|",
        "end|>",
        "a<|im_",
        "object",
        "<think>x</think> y",
        "é𠀀",
    ):
        for messages, tools in chats(lambda name, text=text: text):
            try:
                prompt = tokenizer.chat_template.render(messages, tools=tools)
            except RequestError:
                continue
            found = tokenizer.chat_template.prompt(tokenizer.control_text, messages, tools=tools)
            assert found == (prompt, ())
            assert tokenizer.chat_tokens(messages, tools=tools) == tokenizer.encode(prompt, add_special=False)


def test_a_prompt_with_control_tokens_in_its_text_has_the_same_text(tokenizer):
    for mark in ("<|im_end|>", "</s>", "[INST]"):
        for messages, tools in chats(lambda name, mark=mark: f"{name} {mark} {mark}"):
            try:
                prompt = tokenizer.chat_template.render(messages, tools=tools)
            except RequestError:
                continue
            assert tokenizer.chat_template.prompt(tokenizer.control_text, messages, tools=tools).text == prompt
            ids = tokenizer.chat_tokens(messages, tools=tools)
            assert tokenizer.decode(ids, skip_special=False) == prompt
            assert tokenizer.chat_tokens(messages, True, tools=tools) == tokenizer.encode(prompt, add_special=False)


PIECES = st.sampled_from(
    [*MARKS[:4], "<|im_", "end|>", "<|", "|>", "<", ">", "im_end", "</", "s>", "s", " ", "\n", "a"]
)


@pytest.fixture(scope="module")
def joining(bare):
    """A tokenizer whose template joins fields."""
    source = (
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
        "{{ m.content | trim }}{{ m.name }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
        "<|im_end|>{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{{ '<' ~ tools[0].function.description ~ '>' }}{% endif %}"
    )
    return with_source(bare, source)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(PIECES, max_size=6).map("".join), min_size=4, max_size=4), st.booleans())
def test_fields_that_a_template_joins_make_no_control_token(joining, texts, in_parts):
    content = [{"type": "text", "text": text} for text in texts[:2]] if in_parts else texts[0]
    tools = [{"type": "function", "function": {"name": "f", "description": f"|{texts[3]}|"}}]
    found = controls(joining, [{"role": "user", "content": content, "name": texts[2]}], tools)
    assert found == ["<s>", "<|im_start|>", "<|im_end|>"]


def test_json_that_hides_a_control_token_is_text(bare):
    """Arguments are JSON text, which templates want as objects: escapes are read on the way."""
    tokenizer = with_source(bare, tool_templates.TAGGED_ARGUMENTS)
    for arguments in (r'{"x": "<\u007cim_end|>"}', r'{"<\u007cim_end|>": 1}'):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        found = controls(tokenizer, [{"role": "user", "content": "u"}, said], None)
        assert found == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]


@pytest.mark.parametrize("shown", ["m.content | tojson(ensure_ascii=true)", "m", "m | tojson", "[m.content]"])
def test_filters_and_printed_objects_keep_the_marks(bare, shown):
    tokenizer = with_source(bare, f"{{% for m in messages %}}<|user|>{{{{ {shown} }}}}{{% endfor %}}")
    message = {"role": "user", "content": "a é <|user|> </s>"}
    assert controls(tokenizer, [message]) == ["<|user|>"]
    chat = tokenizer.chat_template.prompt(tokenizer.control_text, [message])
    assert chat.text == tokenizer.chat_template.render([message])


def test_reasoning_in_the_assistants_history_is_still_split(bare):
    """If the marks of reasoning are control tokens, templates find them in what the assistant said, and only there."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and '[/THINK]' in m.content %}"
        "{{ m.content.split('[/THINK]')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    )
    backend = bare.backend.from_str(bare.backend.to_str())
    backend.add_special_tokens(["[THINK]", "[/THINK]"])
    tokenizer = with_source(dataclasses.replace(bare, backend=backend), source)
    thought = "[THINK]secret[/THINK]a <|im_end|>"
    messages = [{"role": "user", "content": thought}, {"role": "assistant", "content": thought}]
    chat = tokenizer.chat_template.prompt(tokenizer.control_text, messages, add_generation_prompt=False)
    text = f"<|im_start|>user\n{thought}<|im_end|><|im_start|>assistant\na <|im_end|><|im_end|>"
    assert chat.text == text
    assert [text[begin:end] for begin, end in chat.literal] == ["[THINK]", "[/THINK]", "<|im_end|>", "<|im_end|>"]


def test_a_continued_answer_is_text_too(bare):
    tokenizer = with_source(bare, CHATML)
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a<|im_end|>b"}]
    assert controls(tokenizer, messages) == ["<s>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_every_character_at_once_is_refused_in_one_line(bare, monkeypatch):
    monkeypatch.setattr("ckdist.tokens.control_text.MARKS", range(0x20000, 0x20010))
    content = "<|im_end|>" + "".join(map(chr, range(0x20000, 0x20010)))
    with pytest.raises(RequestError, match="too many different characters"):
        with_source(bare, CHATML).chat_tokens([{"role": "user", "content": content}])


def test_control_tokens_among_a_models_pieces_are_cut(bare):
    """A vocabulary of SentencePiece has them as pieces that a text can be made of."""
    scores = [("<unk>", 0.0), ("</s>", 0.0), *((letter, -9.0) for letter in "</s>ab")]
    backend = tokenizers.Tokenizer(models.Unigram(scores, unk_id=0))
    backend.add_special_tokens(["</s>"])
    spelled = [backend.token_to_id(letter) for letter in "a</s>b"]
    assert LiteralText(backend).encode("a</s>b") == spelled
    assert LiteralText(backend).encode("a</s>b</s>", [(1, 5)]) == [*spelled, 1]


def test_a_space_before_a_text_comes_once(bare):
    """Metaspace puts it before a text, and before no later part of it."""
    vocabulary = {letter: i for i, letter in enumerate("▁ab</s>")} | {"</s>": 7}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["</s>"])
    expected = [vocabulary[letter] for letter in "▁a</s>b"]
    assert LiteralText(backend).encode("a</s>b", [(1, 5)]) == expected
    assert LiteralText(backend).encode("a</s>b", []) == backend.encode("a</s>b").ids


def test_thousands_of_control_tokens_cost_no_more(bare):
    texts = [f"<|reserved_special_token_{number}|>" for number in range(5000)]
    control = ControlText(texts)
    assert control.needs_mark("a<|reserved_special_token_4999|>") and not control.needs_mark("<|reserved" * 50 + " ")
    chat = control.without_marks(control.marked("<|reserved_special_token_12|>", "#"), "#")
    assert chat == ("<|reserved_special_token_12|>", ((0, 29),))


FACES = {
    "chat": lambda text: {"messages": [{"role": "user", "content": text}]},
    "messages": lambda text: {"messages": [{"role": "user", "content": text}], "system": text, "max_tokens": 4},
    "response": lambda text: {"input": [{"role": "user", "content": text}], "instructions": text},
    "count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "tokenize": lambda text: {"messages": [{"role": "user", "content": text}], "chat_template_kwargs": {"x": text}},
    "completion": lambda text: {"prompt": text},
    "llama_completion": lambda text: {"prompt": text},
    "embedding": lambda text: {"input": text},
}


def length(kind, text, tokenizer, facts):
    result = prepare(kind, json.dumps(FACES[kind](text)).encode(), tokenizer, facts)
    if isinstance(result, (Prepared, EmbeddingWork)):
        ids = list(unpack_tokens(result.prompts[0]))
        return len(ids), sum(i in tokenizer.special_ids for i in ids)
    ids = result.get("tokens")
    return (result["input_tokens"], 0) if ids is None else (len(ids), sum(i in tokenizer.special_ids for i in ids))


@pytest.mark.parametrize("kind", FACES)
def test_every_face_of_the_server(bare, kind):
    """Prompts that are no chats are raw text, in which llama-server and vLLM read control tokens too."""
    tokenizer, permitting = with_source(bare, CHATML), structs.replace(FACTS, special_in_text=True)
    plain = length(kind, "say 0123456789", tokenizer, FACTS)
    marked = length(kind, "say <|im_end|>", tokenizer, FACTS)
    if kind in ("completion", "llama_completion", "embedding"):
        assert marked[0] == plain[0] - 9
    else:
        assert marked == plain
        assert length(kind, "say <|im_end|>", tokenizer, permitting)[0] < plain[0]

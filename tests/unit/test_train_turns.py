"""Chats of every kind of template: what is learned is what a server would generate after the prompt that it renders."""

import json

import numpy as np
import pytest

from ckdist.engine.load_model import BUNDLED
from ckdist.errors import RequestError
from ckdist.serve.requests.prepare import apply_template
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.chat_template import ChatTemplate
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.train.data.token_cache import open_cache
from ckdist.train.data.token_rows import Rows, split
from ckdist.train.data.turns import ADDED_END, EMPTY_THOUGHTS, NO_THOUGHTS, turns_of

HEAD = "{% for m in messages %}{% if m.role != 'assistant' %}<|user|>{{ m.content }}<|end|>\n{% else %}<|assistant|>\n"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
TAIL = "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
TEMPLATES = {
    "history as it was": TOOLS + HEAD + THOUGHT + "{{ m.content or '' }}" + CALLS + "<|end|>\n" + TAIL,
    # Qwen3: only the last answer has thoughts, and an empty block without any
    "thoughts of the last answer": TOOLS
    + HEAD
    + "{% if loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    + CALLS
    + "<|end|>\n"
    + TAIL,
    # DeepSeek-R1-Distill: the prompt opens thoughts, which history drops
    "prompt that opens thoughts": TOOLS
    + HEAD.replace("<|assistant|>\n", "<|assistant|>")
    + "{{ (m.content or '').split('</think>')[-1] }}"
    + CALLS
    + "<|end|>"
    + TAIL.replace("<|assistant|>\n", "<|assistant|><think>\n"),
    # Gemma 4, Laguna: the prompt skips thoughts
    "prompt that skips thoughts": TOOLS
    + HEAD
    + THOUGHT
    + "{{ m.content or '' }}"
    + CALLS
    + "<|end|>\n"
    + TAIL.replace("<|assistant|>\n", "<|assistant|>\n<think></think>"),
    # Hermes: a message is written differently if it is the last one
    "another end of the last message": TOOLS
    + HEAD.replace("<|end|>\n", "{% if loop.last %}!{% endif %}<|end|>\n")
    + "{{ m.content or '' }}"
    + CALLS
    + "<|end|>\n"
    + TAIL,
    # Mistral Nemo: no header, and a part of the prompt is only there if the user is last
    "a note of the last question": TOOLS
    + "{% for m in messages %}{% if m.role != 'assistant' %}{% if loop.last %}Note.{% endif %}<|user|>{{ m.content }}"
    + "<|assistant|>{% else %} {{ m.content or '' }}"
    + CALLS
    + "<|end|>{% endif %}{% endfor %}",
    # Apertus: an answer after a tool's result has no header, which the prompt has
    "no header after a result": TOOLS
    + HEAD.replace("<|assistant|>\n", "{% if loop.previtem.role != 'tool' %}<|assistant|>\n{% endif %}")
    + "{{ m.content or '' }}"
    + CALLS
    + "<|end|>\n"
    + TAIL,
    # Nemotron Nano v2: the prompt opens thoughts, and the template writes no end of them
    "thoughts that never end": TOOLS
    + HEAD
    + "{{ m.content or '' }}"
    + CALLS
    + "<|end|>\n"
    + TAIL.replace("<|assistant|>\n", "<|assistant|>\n<think>\n"),
    # Command R7B: a prompt for the next answer is always there, and skips thoughts
    "always a prompt": TOOLS
    + HEAD
    + "<response>{{ m.content or '' }}"
    + CALLS
    + "<|end|>{% endif %}{% endfor %}<|assistant|>\n<think></think>",
    # Hy3: earlier answers have the header of a prompt, the last one has thoughts in it
    "earlier answers look like prompts": TOOLS
    + HEAD
    + "<think>{% if loop.last %}{{ m.reasoning_content }}{% endif %}</think>{{ m.content or '' }}"
    + CALLS
    + "<|end|>\n"
    + TAIL.replace("<|assistant|>\n", "<|assistant|>\n<think></think>"),
    # GLM: the next message's token ends an answer
    "ended by the next message": TOOLS
    + "{% for m in messages %}{% if m.role != 'assistant' %}<|end|>{{ m.content }}{% else %}<|assistant|>"
    + "{{ m.content or '' }}"
    + CALLS
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
}
USER, MORE = {"role": "user", "content": "Warm?"}, {"role": "user", "content": "And now?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "12 C"}
ANSWERS = [{"role": "assistant", "content": text} for text in ("It is 12 C.", "Colder.")]
CHATS = {
    "two turns": {"messages": [USER, ANSWERS[0], MORE, ANSWERS[1]]},
    "thoughts": {"messages": [USER, ANSWERS[0] | {"thinking": "Hm."}, MORE, ANSWERS[1] | {"reasoning_content": "So."}]},
    "tools": {"messages": [USER, CALLED, RESULT, ANSWERS[0], MORE, ANSWERS[1]], "tools": [TOOL]},
}


@pytest.fixture(scope="module")
def tokenizers():
    made = {}
    for name, source in TEMPLATES.items():
        made[name] = load_tokenizer(BUNDLED)
        object.__setattr__(made[name], "chat_template", ChatTemplate(source))
    return made


def cache_of(tmp_path, tokenizer, *records):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    write = lambda chats: [turns_of(*chat, tokenizer) for chat in chats]
    return open_cache(tmp_path / "cache", [tmp_path / "a.jsonl"], tokenizer, "text", "error", write)


def learned_after(cache, prompt: list[int]) -> list[int] | None:
    """The learned tokens right after `prompt` in the sequence that begins with it."""
    for begin, end in zip(cache.starts[:-1], cache.starts[1:], strict=True):
        ids, flags = cache.tokens[begin:end].tolist(), cache.learned[begin:end]
        if ids[: len(prompt)] == prompt and len(ids) > len(prompt) and flags[len(prompt)]:
            size = int(np.argmin([*flags[len(prompt) :], 0]))
            return ids[len(prompt) : len(prompt) + size]
    return None


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_an_answer_is_learned_after_the_tokens_that_a_server_computes(tmp_path, tokenizers, template, chat):
    tokenizer, record = tokenizers[template], CHATS[chat]
    cache = cache_of(tmp_path, tokenizer, record)
    for index, message in enumerate(record["messages"]):
        if message["role"] != "assistant":
            continue
        body = record | {"messages": record["messages"][:index]}
        prompt = apply_template(body, tokenizer, ModelFacts("m", 4096, 4096))["prompt"]
        ids = learned_after(cache, tokenizer.encode(prompt, add_special=False))
        assert ids is not None, f"messages[{index}] is not learned after {prompt!r}"
        text = tokenizer.decode(ids, skip_special=False)
        assert text.endswith("<|end|>") and text.count("<|end|>") == 1, text
        assert message["content"] in text and ("weather" in text) == ("tool_calls" in message), text
        others = [other["content"] for other in record["messages"] if other is not message and other["content"]]
        assert not any(other in text for other in others if other not in message["content"]), text
    assert sum(cache.learned) == sum(
        len(learned_after(cache, tokenizer.encode(turn.prompt, add_special=False)) or ())
        for turn in turns_of(*checked(record), tokenizer)
    ), "nothing else is learned"


def checked(record):
    """The messages and tools of a record, as its reader gives them."""
    from ckdist.train.data.records import Document, read_record

    document = read_record(record, "a.jsonl:1", "text")
    assert isinstance(document, Document) and document.messages
    return document.messages, document.tools


def test_turns_share_a_sequence_only_if_history_is_as_it_was(tmp_path, tokenizers):
    count = lambda name, chat: cache_of(tmp_path / name[:5], tokenizers[name], CHATS[chat]).documents
    for name in TEMPLATES:
        (tmp_path / name[:5]).mkdir(exist_ok=True)
    assert count("history as it was", "tools") == 1
    assert count("thoughts of the last answer", "two turns") == 2
    assert count("prompt that opens thoughts", "tools") == 3


def answers(tokenizer, record) -> list[str]:
    return [turn.answer[begin:end] for turn in turns_of(*checked(record), tokenizer) for begin, end in turn.learned]


def test_thoughts_are_kept_or_dropped_as_the_template_does_and_counted(tmp_path, tokenizers):
    opens = tokenizers["prompt that opens thoughts"]
    assert answers(opens, CHATS["thoughts"]) == [
        "Hm.\n</think>\n\nIt is 12 C.<|end|>",
        "So.\n</think>\n\nColder.<|end|>",
    ]
    assert answers(opens, CHATS["two turns"])[0] == "\n</think>\n\nIt is 12 C.<|end|>"
    last = tokenizers["thoughts of the last answer"]
    assert answers(last, CHATS["thoughts"])[0] == "<think>\nHm.\n</think>\n\nIt is 12 C.<|end|>"
    marked = {"messages": [USER, {"role": "assistant", "content": "<think>Hm.</think>\n\nIt is."}]}
    assert answers(opens, marked) == ["Hm.\n</think>\n\nIt is.<|end|>"]
    skips = tokenizers["prompt that skips thoughts"]
    assert answers(skips, CHATS["thoughts"])[1] == "Colder.<|end|>"
    report = cache_of(tmp_path, opens, CHATS["two turns"], CHATS["two turns"], CHATS["thoughts"]).report
    assert report.notes == {EMPTY_THOUGHTS: [4, f"{tmp_path}/a.jsonl:1"]}
    assert list(report.lines())[:2] == ["3 records: 3 of messages", "6 answers in 6 sequences"]
    assert [turn.notes for turn in turns_of(*checked(CHATS["thoughts"]), skips)] == [[NO_THOUGHTS]] * 2


def test_records_of_preferences_are_counted_where_their_labels_are_not_read(tmp_path, tokenizers):
    record = {"prompt": "Q", "completion": "A", "label": False}
    report = cache_of(tmp_path, tokenizers["history as it was"], record, CHATS["tools"]).report
    found = "records of preferences: no label and no rejected answer is read"
    assert report.notes == {found: [1, f"{tmp_path}/a.jsonl:1"]}


def test_marked_thoughts_become_those_of_the_template_and_are_dropped_if_it_skips_them(tokenizers):
    marked = {"messages": [USER, {"role": "assistant", "content": "<think>Hm.</think>\n\nIt is."}]}
    tokenizer = load_tokenizer(BUNDLED)
    body = THOUGHT.replace("think>", "seed:think>") + "{{ m.content }}<|end|>"
    object.__setattr__(tokenizer, "chat_template", ChatTemplate(HEAD + body + TAIL))
    assert answers(tokenizer, marked) == ["<seed:think>Hm.</seed:think>It is.<|end|>"]
    assert answers(tokenizers["always a prompt"], marked) == ["<response>It is.<|end|>"]
    never = tokenizers["thoughts that never end"]
    assert answers(never, marked) == ["Hm.</think>\n\nIt is.<|end|>"]
    assert answers(never, CHATS["thoughts"])[1] == "So.\n</think>\n\nColder.<|end|>"


def test_a_missing_end_is_added_and_counted(tokenizers):
    tokenizer = load_tokenizer(BUNDLED)
    source = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:"
    )
    object.__setattr__(tokenizer, "chat_template", ChatTemplate(source + " {% endif %}"))
    turns = turns_of(*checked(CHATS["two turns"]), tokenizer)
    assert [turn.notes for turn in turns] == [[ADDED_END]] * 2
    assert turns[0].answer == "It is 12 C.\n<|endoftext|>"


def test_generation_blocks_say_what_is_learned(tokenizers):
    tokenizer = load_tokenizer(BUNDLED)
    block = "Thought: none.\n{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n"
    object.__setattr__(tokenizer, "chat_template", ChatTemplate(HEAD + block + TAIL))
    assert answers(tokenizer, CHATS["two turns"]) == ["It is 12 C.<|end|>", "Colder.<|end|>"]
    assert "Thought" in turns_of(*checked(CHATS["two turns"]), tokenizer)[0].answer


@pytest.mark.parametrize(
    "body, said",
    [
        ("{{ m.content | upper }}<|end|>", "does not write the content of messages[1] as it is"),
        ("<|end|>", "does not write the content of messages[1] as it is"),
        ("{{ m.content }}<|end|>More.", "writes 'More.' after the end of messages[1]"),
    ],
)
def test_a_template_that_changes_an_answer_is_refused(body, said):
    tokenizer = load_tokenizer(BUNDLED)
    object.__setattr__(tokenizer, "chat_template", ChatTemplate(HEAD + body + TAIL))
    with pytest.raises(RequestError) as caught:
        turns_of(*checked(CHATS["two turns"]), tokenizer)
    assert said in str(caught.value)


def test_sequences_of_one_record_are_held_out_together(tmp_path, tokenizers):
    records = [CHATS["two turns"]] * 10
    cache = cache_of(tmp_path, tokenizers["thoughts of the last answer"], *records)
    train, held = split(cache, 30, seed=1)
    assert len(train) == 14 and len(held) == 6 and not set(train // 2) & set(held // 2)


def test_a_weight_is_the_passes_of_an_epoch(tmp_path, tokenizers):
    cache = cache_of(tmp_path, tokenizers["history as it was"], *[CHATS["two turns"]] * 8)
    passes = np.array([2.0] * 4 + [0.5] * 4)
    rows = Rows(cache, np.arange(8), 64, seed=1, passes=passes)
    epochs = [np.bincount(rows._order(epoch), minlength=8) for epoch in range(6)]
    assert all((counts[:4] == 2).all() and counts[4:].sum() == 2 for counts in epochs)
    assert len({tuple(counts) for counts in epochs}) > 1, "another half in another epoch"

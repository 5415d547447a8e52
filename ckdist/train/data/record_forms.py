"""Converts records of other trainers' forms to messages: ShareGPT, Alpaca, prompt and completion, question and answer.

A field that changes the meaning of a record is converted or refused, never ignored.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from ckdist.errors import RequestError
from ckdist.tokens.chat_input import kind_of

Record: TypeAlias = dict[str, Any]
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bot": "assistant", "function_call": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip
COMPLETION = "prompt and completion"  # a tokenizer without a chat template writes it as plain text


def _conversation(record: Record, key: str) -> list[Any]:
    """ShareGPT's list of `from` and `value`. Entries with `role` are messages already."""
    given = record[key]
    if not isinstance(given, list):
        raise RequestError(f"{key} must be a list, not {kind_of(given)}")
    messages = []
    for index, entry in enumerate(given):
        name = f"{key}[{index}]"
        if not isinstance(entry, dict):
            raise RequestError(f"{name} must be an object, not {kind_of(entry)}")
        if "from" not in entry:
            messages.append(entry)
            continue
        speaker, value = entry["from"], entry.get("value")
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise RequestError(f"{name}.from ({speaker!r:.40}) must be one of {', '.join(SPEAKERS)}")
        if not isinstance(value, str):
            raise RequestError(f"{name}.value must be a text, not {kind_of(value)}")
        rest = {field: entry[field] for field in ("weight", "reasoning_content") if entry.get(field) is not None}
        if speaker == "function_call":
            messages.append({"role": "assistant", "content": "", "tool_calls": _calls(value, name), **rest})
        else:
            messages.append({"role": SPEAKERS[speaker], "content": value, **rest})
    return _with_system(record, messages)


def _calls(value: str, name: str) -> list[Any]:
    """The calls of ShareGPT's function_call: JSON of a name and arguments, or a list of these."""
    try:
        given = json.loads(value)
    except (ValueError, RecursionError):
        raise RequestError(f"{name}.value is not the JSON of a call") from None
    calls = given if isinstance(given, list) else [given]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RequestError(f"{name}.value needs a name and arguments of each call")
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        for call in calls
    ]


def _with_system(record: Record, messages: list[Any]) -> list[Any]:
    system = record.get("system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _question(record: Record, asked: str, given: str, more: str = "") -> list[Any]:
    """One question, with the text of `more` under it, and its answer. Alpaca's `history` has earlier pairs."""
    for key in (asked, given, more):
        if record.get(key) is not None and not isinstance(record[key], str):
            raise RequestError(f"{key} must be a text, not {kind_of(record[key])}")
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history):
        raise RequestError("history must be a list of pairs of a question and an answer")
    question = "\n\n".join(text for text in (record.get(asked), record.get(more)) if text)
    pairs = [*history, (question, record.get(given))]
    messages = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return _with_system(record, messages)


def _completion(record: Record) -> list[Any]:
    """A prompt and its completion: two texts, or two lists of messages."""
    prompt, completion = record["prompt"], record["completion"]
    if not isinstance(prompt, list):
        return _question(record, "prompt", "completion")
    if not isinstance(completion, list):
        raise RequestError(f"completion must be a list of messages as prompt is, not {kind_of(completion)}")
    if any(isinstance(message, dict) and message.get("role") == "assistant" for message in prompt):
        raise RequestError("prompt has an answer of the assistant's, which would be learned too; write messages")
    return [*prompt, *completion]


class Form(NamedTuple):
    """A form of records."""

    keys: tuple[str, ...]  # that a record of the form has
    name: str  # in reports
    convert: Callable[[Record], list[Any]]
    more: tuple[str, ...] = ()  # other keys that it reads


def _asked(name: str, asked: str, given: str, *more: str) -> Form:
    """A form with a question and its answer. `more`: the key of text under the question, then further keys."""
    return Form((asked, given), name, lambda record: _question(record, asked, given, *more[:1]), (*more, "system"))


FORMS = (
    Form(("messages",), "messages", lambda record: record["messages"]),
    Form(("conversations",), "ShareGPT", lambda record: _conversation(record, "conversations"), ("system",)),
    Form(("conversation",), "ShareGPT", lambda record: _conversation(record, "conversation"), ("system",)),
    _asked("Alpaca", "instruction", "output", "input", "history"),
    _asked("instruction and response", "instruction", "response", "context"),
    Form(("prompt", "completion"), COMPLETION, _completion, ("system",)),
    _asked("prompt and response", "prompt", "response"),
    _asked("question and answer", "question", "answer"),
)
KNOWN = "messages, conversations, instruction and output, prompt and completion, or question and answer"


PAIR_KEYS, LABEL_KEYS = ("chosen", "rejected"), ("prompt", "completion", "label")


def preference_keys(keys: Iterable[str]) -> set[str]:
    """The keys among `keys` that a preference reads; empty if the record is none."""
    there = set(keys)
    is_one = there.issuperset(PAIR_KEYS) or there.issuperset(LABEL_KEYS)
    return there & {*PAIR_KEYS, *LABEL_KEYS, "tools", "system"} if is_one else set()


def form_of(keys: Iterable[str]) -> Form | None:
    """The form that a record with `keys` has, or None."""
    there = set(keys)
    return next((form for form in FORMS if there.issuperset(form.keys)), None)

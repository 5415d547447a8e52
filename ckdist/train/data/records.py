"""Reads one record of a data file as a text or a chat, or returns the reason why it is neither.

A record is refused rather than trained on in part: no field that changes the tokens is ignored.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from ckdist.errors import RequestError
from ckdist.tokens.chat_input import kind_of, read_message, read_tool_list
from ckdist.train.data.record_forms import KNOWN, form_of, preference_keys

DEFAULT_COLUMN = "text"
PREFERENCES = "train preferences with method dpo or orpo (tune: --method), or write the chosen chat as messages"
NOT_READ = ("functions", "function_call", "tool_choice", "documents", "chat_template_kwargs", "chat_template")
MOST_KEYS = 12  # keys of a record that a message shows


@dataclass(frozen=True)
class Document:
    """A text, or a chat's messages and tools. `begins` and `ends`: this is the first (last) piece of its text.

    A preference has the labels of its answers, and a chat for each of them: `messages` and those in `others`.
    """

    where: str  # file:line
    text: str = ""
    form: str = field(default="text", kw_only=True)  # of the record, for reports
    messages: list[dict[str, Any]] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    begins: bool = field(default=True, kw_only=True)
    ends: bool = field(default=True, kw_only=True)
    preference: dict[str, Any] | None = field(default=None, kw_only=True)  # these fields of the record
    others: tuple[list[dict[str, Any]], ...] = field(default=(), kw_only=True)
    labels: tuple[int, ...] = field(default=(), kw_only=True)
    is_plain: bool = field(default=False, kw_only=True)  # no template is applied


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used, and the reason."""

    where: str
    why: str
    preference: dict[str, Any] | None = None  # these fields of the record, which has no text and no chat


def read_record(record: object, where: str, text_column: str) -> Document | BadLine:
    """Reads a JSON object or a row of a table. The result has the fields of a preference, too."""
    document = _read(record, where, text_column)
    names = [name for name, value in record.items() if value is not None] if isinstance(record, dict) else []
    if isinstance(record, dict) and (keys := preference_keys(names)):
        return replace(document, preference={key: record[key] for key in keys})
    return document


def _read(record: object, where: str, text_column: str) -> Document | BadLine:
    """Reads a record as a text or a chat.

    A chat's form has precedence over a text, unless `text_column` was set and the record has no `messages`.
    """
    if not isinstance(record, dict):
        return BadLine(where, f"is {kind_of(record)}, not an object")
    present = [name for name, value in record.items() if value is not None]
    form = form_of(present)
    if form is not None and not (
        text_column in present and "messages" not in present and text_column != DEFAULT_COLUMN
    ):
        try:
            return read_chat(record, form.convert(record), where, form.name)
        except RequestError as error:
            return BadLine(where, f"has a chat that cannot be learned: {error}")
    text = record.get(text_column)
    if text is None:
        return BadLine(where, no_text(list(record), text_column))
    if not isinstance(text, str):
        return BadLine(where, f"has {kind_of(text)} in {text_column!r}, not a text")
    if any("\ud800" <= character <= "\udfff" for character in text):
        return BadLine(where, "has a text that is not Unicode (half of a surrogate pair)")
    return Document(where, text) if text else BadLine(where, f"has an empty text in {text_column!r}")


def no_text(keys: list[str], text_column: str) -> str:
    """A message for a record without a text or a chat: its keys, the forms that are read, and a remedy."""
    remedy = f"give {KNOWN}, or set text_column to the text's key"
    if {"chosen", "rejected"} <= set(keys):
        remedy = PREFERENCES
    shown = ", ".join(map(str, keys[:MOST_KEYS])) + (", …" if len(keys) > MOST_KEYS else "")
    return f"has no text in {text_column!r} and no chat; its keys are {shown[:200] or 'none'}: {remedy}"


def columns_of(names: list[str], text_column: str) -> list[str]:
    """The columns of a table that `read_record` reads."""
    form = form_of(names)
    read = {text_column, "tools", *NOT_READ, *preference_keys(names), *((*form.keys, *form.more) if form else ())}
    return [name for name in names if name in read]


def read_chat(record: dict[str, Any], given: object, where: str, form: str) -> Document:
    """Reads messages, and the tools of their record.

    Raises RequestError for a chat that serving would refuse, or that teaches nothing or the wrong thing.
    """
    if unread := [name for name in NOT_READ if record.get(name)]:
        raise RequestError(f"{unread[0]} is not read in training; remove it, or give tools and tool_calls")
    tools = record.get("tools")
    if isinstance(tools, str):  # tables hold tools as JSON
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise RequestError("tools is a text that is not JSON") from None
    if not isinstance(given, list) or not given:
        raise RequestError(f"messages must be a list of messages, not {kind_of(given) if given else 'empty'}")
    if tools is not None and not isinstance(tools, list):
        raise RequestError(f"tools must be a list, not {kind_of(tools)}")
    messages = [read_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    _check_order([message["role"] for message in messages])
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    _check_results(messages)
    try:
        json.dumps([messages, tools], ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise RequestError("a text is not Unicode (half of a surrogate pair)") from None
    return Document(where, messages=messages, tools=read_tool_list(tools or [], "tools"), form=form)


def _check_order(roles: list[str]) -> None:
    """Raises RequestError if an answer has no question, or a question no answer."""
    head = 0
    while head < len(roles) and roles[head] in ("system", "developer"):
        head += 1
    if roles[:head] not in ([], ["system"], ["developer"], ["system", "developer"]):
        shown = ", ".join(roles[:head])
        raise RequestError(
            f"messages begin with the roles {shown}; one system and one developer message may come first"
        )
    for index, role in enumerate(roles[head:], head):
        before = roles[index - 1] if index > head else ""
        if role in ("system", "developer"):
            raise RequestError(f"messages[{index}] has the role {role!r}, which may only come first")
        if role == "assistant" and before not in ("user", "tool", "function"):
            earlier = "another answer" if before else "no question"
            raise RequestError(f"messages[{index}] is an answer, but {earlier} comes before it")
        if role in ("tool", "function") and before not in ("assistant", "tool", "function"):
            raise RequestError(f"messages[{index}] has the role {role!r}, but no tool call comes before it")
    if roles[-1] != "assistant":
        raise RequestError(f"its last message has the role {roles[-1]!r}; it must be the assistant's answer")


def _check_message(message: dict[str, Any], name: str) -> None:
    """Raises RequestError for a field that would be ignored, and for an empty answer."""
    calls = message.get("tool_calls")
    if message.get("function_call"):
        raise RequestError(f"{name}.function_call is not read; write it as tool_calls")
    if message.get("weight") not in (None, 1):
        raise RequestError(f"{name}.weight ({message['weight']!r:.20}) is not read; every answer is learned")
    if message["role"] != "assistant":
        if calls:
            raise RequestError(
                f"{name} has tool_calls, but the role {message['role']!r}; only the assistant calls tools"
            )
        return
    for index, call in enumerate(calls or ()):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{name}.tool_calls[{index}] needs a function with a name")
        if not isinstance(function.get("arguments", ""), (str, dict)):
            raise RequestError(f"{name}.tool_calls[{index}]: arguments must be an object, or its JSON text")
    if not (message["content"] or calls or message.get("reasoning_content")):
        raise RequestError(f"{name} is an empty answer")


def _check_results(messages: list[dict[str, Any]]) -> None:
    """Raises RequestError for a tool's result without an earlier call."""
    ids: list[Any] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            ids = [call.get("id") for call in message.get("tool_calls") or ()]
            continue
        if message["role"] not in ("tool", "function"):
            continue
        if not ids:
            raise RequestError(f"messages[{index}] has the role {message['role']!r}, but no tool call comes before it")
        answered = message.get("tool_call_id")
        if answered is not None and None not in ids and answered not in ids:
            raise RequestError(f"messages[{index}].tool_call_id ({answered!r:.40}) is the id of no call before it")

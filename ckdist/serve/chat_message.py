"""An assistant message while it is generated: content, reasoning and tool calls."""

import json
import re
import secrets
import string
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ckdist.serve.parsers.delta import AnswerParser, Delta
from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.parsers.harmony_parser import HarmonyParser
from ckdist.serve.parsers.marked import MarkedParser
from ckdist.tokens.chat_input import TEXT

LETTERS = string.ascii_letters + string.digits
ID_CHARS = 9  # some templates refuse other lengths
ARGUMENTS = re.compile(r'\s*\{\s*"input"\s*:\s*"')  # start of a custom call's arguments, before its text
MAX_ESCAPE = 12  # characters of a surrogate pair in JSON, whose end may be cut off


@dataclass
class ToolCall:
    """A tool call. Complete `arguments` are JSON, or free text if the tool is `custom`."""

    id: str
    name: str
    arguments: str = ""
    custom: bool = False

    def openai(self) -> dict[str, Any]:
        """Returns the call in OpenAI's format."""
        return {"id": self.id, **_call(self.name, self.arguments, self.custom)}


class ChatParser:
    """Parses the text of one choice into deltas. Without a form all text is content.

    `calls` is the number of calls that have begun.
    """

    def __init__(self, form: AnswerForm | None):
        self._parser: AnswerParser | None = None if form is None else parser_of(form)
        self._custom = () if form is None else form.custom
        self.calls = 0
        self._arguments = ""  # of the last call
        self._is_custom = False  # whether the last call is custom

    def take(self, text: str, ended: bool) -> list[Delta]:
        """Returns the deltas of the next `text`. If the choice has `ended`, this includes all text that was held back.

        The first delta of a call has its id, its name and no arguments. The text of a custom tool comes in one delta.
        """
        if self._parser is None:
            return [Delta(content=text)] if text else []
        deltas = self._parser.step(text) if text else []
        deltas += self._parser.flush() if ended else []
        given = [part for delta in deltas for part in self._parts(delta)]
        return given + (self._cut_text() if ended else [])

    def _parts(self, delta: Delta) -> Iterator[Delta]:
        if delta.name is not None or delta.call is None:  # the last call has ended
            yield from self._cut_text()
        if delta.name is not None:
            self.calls += 1
            self._arguments, self._is_custom = "", delta.name in self._custom
            yield replace(delta, id=delta.id or new_id(), arguments="", custom=self._is_custom)
        if delta.call is None:
            yield delta
            return
        self._arguments += delta.arguments
        if self._is_custom:
            if not self.ends_in_call:
                yield from self._cut_text()
        elif delta.arguments:
            yield Delta(call=delta.call, arguments=delta.arguments)

    def _cut_text(self) -> list[Delta]:
        """Returns the text of the last call if it is custom, even if it is incomplete."""
        if not self._is_custom:
            return []
        self._is_custom = False
        return [Delta(call=self.calls - 1, arguments=custom_text(self._arguments), custom=True)]

    @property
    def ends_in_call(self) -> bool:
        """True if the last call has begun and its arguments are incomplete."""
        try:
            json.loads(self._arguments if self.calls else "{}")
        except (ValueError, RecursionError):
            return True
        return False


@dataclass
class ChatMessage:
    """The whole message of one choice."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def add(self, deltas: Iterable[Delta]) -> None:
        """Appends `deltas` to the message."""
        for delta in deltas:
            self.content += delta.content
            self.reasoning += delta.reasoning
            if delta.name is not None:
                self.calls.append(ToolCall(delta.id or new_id(), delta.name, custom=delta.custom))
            if delta.call is not None:
                self.calls[-1].arguments += delta.arguments

    def openai(self) -> dict[str, Any]:
        """Returns the message in OpenAI's format. Reasoning has both names that clients read."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": [call.openai() for call in self.calls]}
        return message


def parser_of(form: AnswerForm) -> AnswerParser:
    """Returns a new parser for one choice."""
    return MarkedParser(form) if form.channels is None else HarmonyParser(form)


def call_delta(delta: Delta) -> dict[str, Any]:
    """Returns a delta in OpenAI's streaming format."""
    shown: dict[str, Any] = {}
    if delta.content:
        shown["content"] = delta.content
    if delta.reasoning:
        shown |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    if delta.name is not None:
        call = _call(delta.name, delta.arguments, delta.custom)
        shown["tool_calls"] = [{"index": delta.call, "id": delta.id, **call}]
    elif delta.call is not None:
        grown = {"custom": {TEXT: delta.arguments}} if delta.custom else {"function": {"arguments": delta.arguments}}
        shown["tool_calls"] = [{"index": delta.call, **grown}]
    return shown


def custom_text(arguments: str) -> str:
    """Returns the free text in a custom call's arguments. If they were cut off, this is the part up to there."""
    try:
        return str(json.loads(arguments)[TEXT])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = ARGUMENTS.sub("", arguments)
    for end in range(len(text), max(0, len(text) - MAX_ESCAPE), -1):
        with suppress(ValueError):  # the text may end within an escape
            return str(json.loads(f'"{text[:end]}"'))
    return text


def parsed_arguments(arguments: str) -> Any:
    """Returns the arguments of a call as JSON; those that were cut off as `partial_json`."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return {"partial_json": arguments}


def _call(name: str, arguments: str, custom: bool) -> dict[str, Any]:
    if custom:
        return {"type": "custom", "custom": {"name": name, TEXT: arguments}}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def new_id() -> str:
    """Returns a new random id for a call."""
    return "".join(secrets.choice(LETTERS) for _ in range(ID_CHARS))

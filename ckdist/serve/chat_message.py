"""A message of the assistant's while it grows: its content, its reasoning, its calls of tools."""

import json
import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ckdist.serve.parsers.choose import parser_of
from ckdist.serve.parsers.delta import AnswerParser, Delta
from ckdist.serve.parsers.form import AnswerForm

LETTERS = string.ascii_letters + string.digits
ID_CHARS = 9  # some templates refuse other lengths


@dataclass
class ToolCall:
    """A call, whose arguments are JSON once they are whole."""

    id: str
    name: str
    arguments: str = ""

    def openai(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ChatParser:
    """Takes one choice's text apart; without a form it is content alone. `calls` is how many have begun."""

    def __init__(self, form: AnswerForm | None):
        self._parser: AnswerParser | None = None if form is None else parser_of(form)
        self.calls = 0
        self._arguments: list[str] = []  # of the last call

    def take(self, text: str, ended: bool) -> list[Delta]:
        """What `text` brings, and all that was held back where the choice has `ended`. Every call has an id."""
        if self._parser is None:
            return [Delta(content=text)] if text else []
        deltas = self._parser.step(text) if text else []
        deltas += self._parser.flush() if ended else []
        for delta in deltas:
            if delta.name is not None:
                self.calls += 1
                self._arguments.clear()
            if delta.call is not None:
                self._arguments.append(delta.arguments)
        return [replace(d, id=d.id or new_id()) if d.name is not None else d for d in deltas]

    @property
    def ends_in_call(self) -> bool:
        """Whether the last call has begun and its arguments are not whole."""
        try:
            json.loads("".join(self._arguments) if self.calls else "{}")
        except (ValueError, RecursionError):
            return True
        return False


@dataclass
class ChatMessage:
    """All of one choice."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def add(self, deltas: Iterable[Delta]) -> None:
        """What the choice has grown by."""
        for delta in deltas:
            self.content += delta.content
            self.reasoning += delta.reasoning
            if delta.name is not None:
                self.calls.append(ToolCall(delta.id or new_id(), delta.name))
            if delta.call is not None:
                self.calls[-1].arguments += delta.arguments

    def openai(self) -> dict[str, Any]:
        """As OpenAI writes it; reasoning stands under both names that clients read."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self.calls:
            message |= {"content": self.content or None, "tool_calls": [call.openai() for call in self.calls]}
        return message


def call_delta(delta: Delta) -> dict[str, Any]:
    """A delta as OpenAI streams it."""
    shown: dict[str, Any] = {}
    if delta.content:
        shown["content"] = delta.content
    if delta.reasoning:
        shown |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    if delta.name is not None:
        function = {"name": delta.name, "arguments": delta.arguments}
        shown["tool_calls"] = [{"index": delta.call, "id": delta.id, "type": "function", "function": function}]
    elif delta.call is not None:
        shown["tool_calls"] = [{"index": delta.call, "function": {"arguments": delta.arguments}}]
    return shown


def new_id() -> str:
    """Of a call."""
    return "".join(secrets.choice(LETTERS) for _ in range(ID_CHARS))

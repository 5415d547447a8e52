"""Parses OpenAI's harmony format, in which messages have channels.

A message in `analysis` is reasoning, a message to a tool is a call, and all others are content.
"""

import re
from collections.abc import Callable

from ckdist.serve.parsers.delta import AnswerParser, Delta
from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.parsers.reader import NotAsExpected, Parsing
from ckdist.tokens.harmony import CALL, CHANNEL, END, FUNCTIONS, MARKS, MESSAGE, RETURN, START

MAX_HEADER = 1024  # characters
SPEAKER = re.compile(rf"\s*(?:{re.escape(START)})?\s*([^\s<]*)")
RECIPIENT = re.compile(r"\bto=([^\s<]{1,256})")
IN_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
APART = "\n\n"  # between messages of one kind


class HarmonyParser(AnswerParser):
    """Parses one answer. Text without any mark is content. Messages in another speaker's name are left out."""

    def __init__(self, form: AnswerForm):
        super().__init__(form)
        self._calls, self._arguments_came, self._said = 0, False, {"content": False, "reasoning": False}
        self.step(form.channels or "")  # start of the answer, from the prompt, which has no deltas

    def _answer(self) -> Parsing[None]:
        reader = self._reader
        while not reader.ended or reader.left:
            parts = list[str]()
            try:
                found = yield from reader.until((MESSAGE,), _at_most(MAX_HEADER, parts))
            except NotAsExpected:
                found = None
            if found is None:
                text, give = "".join(parts), self._give("content")
                give("" if any(mark in text for mark in MARKS) else text)
                yield from reader.until((), give)
                return
            yield from self._message("".join(parts))

    def _message(self, header: str) -> Parsing[None]:
        """Reads a message after its header, up to its end."""
        tool = self._tool(header)
        if tool is not None:
            self._deltas.append(Delta(call=self._calls, name=tool))
            self._calls += 1
            yield from self._reader.space()
        found = yield from self._reader.until((END, CALL, RETURN, START), self._sink(header, tool))
        if tool is not None and not self._arguments_came:
            self._deltas.append(Delta(call=self._calls - 1, arguments="{}"))
        if found == START:
            self._reader.at -= len(START)  # it begins the next header

    def _tool(self, header: str) -> str | None:
        """The tool that a message calls; None if the request has no such tool."""
        to = RECIPIENT.search(header)
        if to is None or self._form.calls is None or not self._is_own(header):
            return None
        name = to[1].removeprefix(FUNCTIONS)
        return name if name != to[1] or name in self._form.types else None

    def _sink(self, header: str, tool: str | None) -> Callable[[str], None]:
        """Returns the function that takes the text of a message."""
        if tool is not None:
            self._arguments_came = False
            return self._arguments
        if not self._is_own(header):
            return lambda _: None
        channel = IN_CHANNEL.search(header)
        thinks = (channel is not None and channel[1] == "analysis") or RECIPIENT.search(header) is not None
        return self._give("reasoning" if thinks and self._form.think is not None else "content")

    def _is_own(self, header: str) -> bool:
        """True if the assistant is the speaker. The prompt has its name before the first message."""
        speaker = SPEAKER.match(header)
        return speaker is None or speaker[1] in ("", "assistant") or speaker[1].startswith("to=")

    def _arguments(self, text: str) -> None:
        self._arguments_came = True
        self._deltas.append(Delta(call=self._calls - 1, arguments=text))

    def _give(self, kind: str) -> Callable[[str], None]:
        """Returns a function that takes the text of a message. APART separates it from an earlier one of its kind."""
        begins = True

        def give(text: str) -> None:
            """Takes a part of the text."""
            nonlocal begins
            if not text:
                return
            apart = APART if begins and self._said[kind] else ""
            begins, self._said[kind] = False, True
            self._deltas.append(Delta(reasoning=apart + text) if kind == "reasoning" else Delta(content=apart + text))

        return give


def _at_most(most: int, parts: list[str]) -> Callable[[str], None]:
    """Returns a function that appends to `parts`. It raises NotAsExpected for more than `most` characters in all."""

    def give(text: str) -> None:
        """Takes a part of the text."""
        if sum(map(len, parts)) + len(text) > most:
            raise NotAsExpected("a header")  # the reader keeps the text
        parts.append(text)

    return give

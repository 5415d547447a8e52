"""Reads a text that arrives in parts. A parser is a generator that yields whenever it needs more text."""

from collections.abc import Callable, Generator
from typing import TypeVar

Result = TypeVar("Result")
Parsing = Generator[None, None, Result]
SPACE = " \t\r\n"
MAX_LITERAL = 64  # characters of a number or a word of JSON


class NotAsExpected(Exception):  # noqa: N818 - a text of another form is no error
    """The text does not have the form that the parser expects."""


class TextReader:
    """A text and a position in it. `text` from `at` on is unread. Once `ended`, no more text arrives."""

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False

    def feed(self, text: str) -> None:
        """Appends the next part of the text."""
        self.text, self.at = self.text[self.at :] + text, 0

    @property
    def left(self) -> int:
        """The number of unread characters."""
        return len(self.text) - self.at

    def until(self, markers: tuple[str, ...], give: Callable[[str], None]) -> Parsing[str | None]:
        """Passes the text before the first of `markers` to `give`, and reads that marker.

        Returns the marker, or None if the text ends before one.
        """
        longest = max(map(len, markers), default=1)
        while True:
            found = [(self.text.find(marker, self.at), marker) for marker in markers]
            found = [(at, -len(marker), marker) for at, marker in found if at >= 0]
            if found:
                at, _, marker = min(found)
                # A longer marker may begin here, whose end has not arrived yet.
                if not self.ended and len(self.text) - at < longest and self._may_begin(at, markers, len(marker)):
                    self._give(at, give)
                    yield
                    continue
                self._give(at, give)
                self.at = at + len(marker)
                return marker
            begin = max(self.at, len(self.text) - longest + 1)
            safe = next((i for i in range(begin, len(self.text)) if self._may_begin(i, markers, 0)), len(self.text))
            self._give(len(self.text) if self.ended else safe, give)
            if self.ended:
                return None
            yield

    def space(self) -> Parsing[None]:
        """Reads white space."""
        while True:
            while self.left and self.text[self.at] in SPACE:
                self.at += 1
            if self.left or self.ended:
                return
            yield

    def peek(self) -> Parsing[str]:
        """Returns the next character without reading it; empty at the end."""
        while not self.left and not self.ended:
            yield
        return self.text[self.at] if self.left else ""

    def starts(self, text: str) -> Parsing[bool]:
        """Reads `text` if it comes next. Returns whether it does, as soon as that is certain."""
        while True:
            n = min(self.left, len(text))
            if self.text[self.at : self.at + n] != text[:n]:
                return False
            if n == len(text):
                self.at += n
                return True
            if self.ended:
                return False
            yield

    def expect(self, text: str) -> Parsing[None]:
        """Reads `text`. Raises NotAsExpected if something else comes."""
        if not (yield from self.starts(text)):
            raise NotAsExpected(text)

    def value(self, give: Callable[[str], None]) -> Parsing[None]:
        """Reads one JSON value, and passes its text to `give` as it arrives.

        Raises NotAsExpected if the text ends before the value, or is not JSON.
        """
        depth, in_string, escaped, literal = 0, False, False, 0
        while True:
            begin = self.at
            while self.at < len(self.text):
                character = self.text[self.at]
                if literal and (character in ",]}" or character in SPACE):
                    self._give_from(begin, give)
                    return
                self.at += 1
                if in_string:
                    escaped, in_string = character == "\\" and not escaped, character != '"' or escaped
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                elif not depth:
                    literal += 1
                    if literal > MAX_LITERAL:
                        raise NotAsExpected("a value")
                    continue
                if depth < 0:
                    raise NotAsExpected("a value")
                if depth == 0 and not in_string:
                    self._give_from(begin, give)
                    return
            self._give_from(begin, give)
            if self.ended:
                if literal:
                    return
                raise NotAsExpected("a value")
            yield

    def _give(self, end: int, give: Callable[[str], None]) -> None:
        if end > self.at:
            give(self.text[self.at : end])
            self.at = end

    def _give_from(self, begin: int, give: Callable[[str], None]) -> None:
        if self.at > begin:
            give(self.text[begin : self.at])

    def _may_begin(self, at: int, markers: tuple[str, ...], least: int) -> bool:
        """True if a marker longer than `least` may begin at `at`, whose end has not arrived yet."""
        rest = self.text[at:]
        return any(len(marker) > max(least, len(rest)) and marker.startswith(rest) for marker in markers)

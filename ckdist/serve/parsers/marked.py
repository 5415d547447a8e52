"""Parses answers that have reasoning between two marks, text, and calls after a mark."""

from ckdist.serve.parsers.calls import CallReader
from ckdist.serve.parsers.delta import Delta, joined
from ckdist.serve.parsers.reader import SPACE, NotAsExpected, Parsing, TextReader

ERRORS = (NotAsExpected, ValueError, RecursionError)  # the last two are raised for invalid JSON


class MarkedParser:
    """Parses one answer. Reasoning can only come first. A text that only looked like a call becomes content.

    Args:
        think: The marks around reasoning, or None.
        in_thought: Whether the prompt ends with the first of them.
        calls: Reads calls; None if the request has no tools.
        reader: The reader of `calls`.
        deltas: The list that `calls` appends to.
        most_calls: Later calls are left out.
    """

    def __init__(
        self,
        think: tuple[str, str] | None,
        in_thought: bool,
        calls: CallReader | None,
        reader: TextReader,
        deltas: list[Delta],
        most_calls: int | None = None,
    ):
        self._think, self._in_thought, self._calls, self._reader = think, in_thought, calls, reader
        self._most_calls = most_calls
        self._deltas, self._held = deltas, ""
        self._parsing = self._answer()
        next(self._parsing, None)

    def step(self, text: str) -> list[Delta]:
        """See AnswerParser."""
        self._reader.feed(text)
        return self._go_on()

    def flush(self) -> list[Delta]:
        """See AnswerParser."""
        self._reader.feed("")
        self._reader.ended = True
        deltas = self._go_on()
        calls = self._calls.count if self._calls is not None else 0
        return deltas if calls or not self._held else [*deltas, Delta(content=self._held)]

    def _go_on(self) -> list[Delta]:
        next(self._parsing, None)
        deltas = joined(self._deltas)
        self._deltas.clear()
        if self._most_calls is not None:
            deltas = [delta for delta in deltas if delta.call is None or delta.call < self._most_calls]
        return deltas

    def _answer(self) -> Parsing[None]:
        reader = self._reader
        if self._think is not None:
            yield from self._reasoning(*self._think)
        if self._calls is not None and self._calls.may_be_bare:
            yield from self._bare_calls(self._calls)
        trigger = self._calls.trigger if self._calls is not None else ""
        while not reader.ended or reader.left:
            if (yield from reader.until((trigger,) if trigger else (), self._content)) is None:
                return
            if self._calls is not None:
                yield from self._tried_calls(self._calls, trigger)

    def _reasoning(self, begin: str, end: str) -> Parsing[None]:
        reader = self._reader
        if not self._in_thought:
            yield from reader.space()
            if not (yield from reader.starts(begin)):
                return
        yield from reader.space()
        yield from reader.until((end,), lambda text: self._deltas.append(Delta(reasoning=text)))
        yield from reader.space()

    def _bare_calls(self, calls: CallReader) -> Parsing[None]:
        """Reads calls without a mark: JSON objects at the start of the answer."""
        reader = self._reader
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            return
        yield from self._tried_calls(calls, "")

    def _tried_calls(self, calls: CallReader, mark: str) -> Parsing[None]:
        """Reads calls after `mark`. If there is none, the text is content."""
        reader, count, raw = self._reader, calls.count, _Recorder(self._reader)
        try:
            yield from raw.recorded(calls.calls())
        except ERRORS:
            if calls.count == count:
                self._content(mark + raw.text)
        if calls.count > count:
            yield from reader.space()

    def _content(self, text: str) -> None:
        """Passes on content, without the white space before and after calls."""
        text = self._held + text
        end = len(text.rstrip(SPACE))
        text, self._held = text[:end], text[end:]
        if text:
            self._deltas.append(Delta(content=text))


class _Recorder:
    """Records the text that a parser reads."""

    def __init__(self, reader: TextReader):
        self._reader, self.text = reader, ""

    def recorded(self, parsing: Parsing[None]) -> Parsing[None]:
        """Runs `parsing` and keeps all the text that it reads."""
        reader = self._reader
        begin = reader.at
        try:
            while True:
                try:
                    next(parsing)
                except StopIteration:
                    return
                self.text += reader.text[begin : reader.at]
                yield
                begin = 0  # `feed` has dropped the text before `at`
        finally:
            self.text += reader.text[begin : reader.at]

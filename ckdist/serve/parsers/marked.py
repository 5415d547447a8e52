"""Parses answers that have reasoning between two marks, text, and calls after a mark."""

from ckdist.serve.parsers.calls import CallReader, KimiCallReader
from ckdist.serve.parsers.delta import AnswerParser, Delta
from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.parsers.llama3 import PythonTagCallReader
from ckdist.serve.parsers.reader import SPACE, NotAsExpected, Parsing, TextReader

CALL_READERS = {"kimi": KimiCallReader, "llama3": PythonTagCallReader}  # all other kinds have a CallReader
ERRORS = (NotAsExpected, ValueError, RecursionError)  # the last two are raised for invalid JSON


class MarkedParser(AnswerParser):
    """Parses one answer. Reasoning can only come first. A text that only looked like a call becomes content."""

    def __init__(self, form: AnswerForm):
        super().__init__(form)
        self._held, self._calls = "", None
        if form.calls is not None:
            kind = CALL_READERS.get(form.calls.kind, CallReader)
            self._calls = kind(form.calls, form.types, self._reader, self._deltas.append)

    def flush(self) -> list[Delta]:
        """Returns the remaining deltas. White space at the end counts, unless it follows a call."""
        deltas = super().flush()
        called = self._calls is not None and self._calls.count
        return deltas if called or not self._held else [*deltas, Delta(content=self._held)]

    def _answer(self) -> Parsing[None]:
        reader = self._reader
        if self._form.think is not None:
            yield from self._reasoning(*self._form.think)
        calls = self._calls
        if calls is None:
            yield from reader.until((), self._content)
            return
        if calls.may_be_bare:  # a JSON object at the start of the answer
            yield from reader.space()
            if (yield from reader.peek()) == "{":
                yield from self._tried_calls(calls, "")
        while not reader.ended or reader.left:
            if (yield from reader.until((calls.trigger,) if calls.trigger else (), self._content)) is None:
                return
            yield from self._tried_calls(calls, calls.trigger)

    def _reasoning(self, begin: str, end: str) -> Parsing[None]:
        reader = self._reader
        if not self._form.in_thought:
            yield from reader.space()
            if not (yield from reader.starts(begin)):
                return
        yield from reader.space()
        yield from reader.until((end,), lambda text: self._deltas.append(Delta(reasoning=text)))
        yield from reader.space()

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

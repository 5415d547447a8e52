"""Chooses the parser of an answer by its form."""

from ckdist.serve.parsers.calls import CallReader
from ckdist.serve.parsers.delta import AnswerParser, Delta
from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.parsers.harmony_parser import HarmonyParser
from ckdist.serve.parsers.kimi import KimiCallReader
from ckdist.serve.parsers.llama3 import PythonTagCallReader
from ckdist.serve.parsers.marked import MarkedParser
from ckdist.serve.parsers.reader import TextReader

CALL_READERS = {"kimi": KimiCallReader, "llama3": PythonTagCallReader}


def parser_of(form: AnswerForm) -> AnswerParser:
    """Returns a new parser for one choice. Some kinds of calls have a reader of their own."""
    if form.channels is not None:
        return HarmonyParser(form)
    reader, deltas, calls = TextReader(), list[Delta](), None
    if form.calls is not None:
        kind = CALL_READERS.get(form.calls.kind, CallReader)
        calls = kind(form.calls, form.types, reader, deltas.append)
    return MarkedParser(form.think, form.in_thought, calls, reader, deltas, form.most_calls)

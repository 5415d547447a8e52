"""Kimi K2: names are written as functions.NAME:NUMBER. All of it is the call's id, which its template writes again in
the next turn, in place of the name.
"""

from collections.abc import Callable

from ckdist.serve.parsers.calls import MAX_ID, CallReader, Types
from ckdist.serve.parsers.delta import Delta
from ckdist.serve.parsers.reader import TextReader
from ckdist.tokens.tool_format import ToolFormat


class KimiCallReader(CallReader):
    """As the others, but for names and ids."""

    def __init__(self, form: ToolFormat, types: Types, reader: TextReader, give: Callable[[Delta], None]):
        super().__init__(form, types, reader, give)
        self._ids: set[str] = set()

    def name(self, text: str) -> str:
        """The name between its prefix and its number."""
        return text.removeprefix("functions.").partition(":")[0]

    def id(self, text: str) -> str | None:
        """All that stands there; None where it has no number, or another call has it."""
        if ":" not in text or len(text) > MAX_ID or text in self._ids:
            return None
        self._ids.add(text)
        return text

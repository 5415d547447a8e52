"""Reads Kimi K2's calls, in which names are written as functions.NAME:NUMBER.

All of that is the call's id, which the template writes in place of the name in the next turn.
"""

from collections.abc import Callable

from ckdist.serve.parsers.calls import MAX_ID, CallReader, Types
from ckdist.serve.parsers.delta import Delta
from ckdist.serve.parsers.reader import TextReader
from ckdist.tokens.tool_format import ToolFormat


class KimiCallReader(CallReader):
    """A CallReader for Kimi's names and ids."""

    def __init__(self, form: ToolFormat, types: Types, reader: TextReader, give: Callable[[Delta], None]):
        super().__init__(form, types, reader, give)
        self._ids: set[str] = set()

    def name(self, text: str) -> str:
        """Returns the name between its prefix and its number."""
        return text.removeprefix("functions.").partition(":")[0]

    def id(self, text: str) -> str | None:
        """Returns the whole text, or None if it has no number, is too long, or is another call's id."""
        if ":" not in text or len(text) > MAX_ID or text in self._ids:
            return None
        self._ids.add(text)
        return text

"""Kimi K2: names are written as functions.NAME:NUMBER."""

from ckdist.serve.parsers.calls import CallReader


class KimiCallReader(CallReader):
    """As the others, but for names."""

    def name(self, text: str) -> str:
        """The name between its prefix and its number."""
        return text.strip().removeprefix("functions.").partition(":")[0]

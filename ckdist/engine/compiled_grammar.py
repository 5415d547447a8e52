"""A grammar compiled for one vocabulary, which all sequences that follow it share."""

from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class CompiledGrammar:
    """A grammar compiled for one vocabulary. Sequences follow copies of its matcher.

    The copies share the states of one lexer, which are made as texts need them. So a grammar's memory grows with
    `seconds`.

    Attributes:
        text: Source of the grammar.
        future: The matcher at the beginning of the grammar. The caller that starts compiling sets it.
        seconds: CPU time of compiling and following the grammar.
        compiling_seconds: CPU time of compiling alone.
        is_stuck: An abandoned thread holds a copy and the lock of the shared states, so no copy may be used any more.
    """

    future: "Future[LLMatcher]"

    def __init__(self, text: str) -> None:
        self.text = text
        self.seconds = self.compiling_seconds = 0.0
        self.is_stuck = False

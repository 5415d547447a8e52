"""A grammar compiled for one vocabulary, which all sequences that follow it share."""

from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


class CompiledGrammar:
    """`text`: what was compiled. `future`: the matcher at the grammar's beginning; sequences follow copies of it.

    The copies share the states of one lexer, which are made as texts need them. So what a grammar keeps grows with
    `seconds`, the CPU time that compiling and following it have taken; `compiling_seconds` is the first part.
    `is_stuck`: a thread was left behind with a copy, and with the lock of the shared states; no copy may be asked any
    more.
    """

    future: "Future[LLMatcher]"

    def __init__(self, text: str) -> None:
        """`future` is to be set by who has it compiled."""
        self.text = text
        self.seconds = self.compiling_seconds = 0.0
        self.is_stuck = False

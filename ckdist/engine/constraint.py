"""A sequence's position in its grammar: the tokens that may come next, and those that must."""

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ckdist.engine.compiled_grammar import CompiledGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

WORD_BITS = 32
# CPU time that a sequence may use: at once, as for its first masks, and per token on average. Schemas take hundredths
# of a millisecond per token.
FIRST_SECONDS, TOKEN_SECONDS = 0.1, 0.001
TOO_SLOW = "the grammar takes too much time; make it simpler"


class Constraint:
    """Follows a grammar token by token. One thread at a time uses it.

    All sequences of a step wait for its masks, so a constraint that takes too much time in all gets an `error`.

    Args:
        compiled: The grammar. The constraint follows a copy of its matcher.

    Attributes:
        allowed: Mask of the next token, uint32 (ceil(vocabulary / 32),). Token t is bit t % 32 of word t // 32.
        error: The reason why the grammar cannot be followed any further, or None.
        earlier: Tokens that another engine drew. They are followed before the first mask.
        forced: Tokens that come next without sampling.
    """

    def __init__(self, compiled: CompiledGrammar, vocab_size: int) -> None:
        self.compiled = compiled
        self.allowed = np.zeros(-(-vocab_size // WORD_BITS), np.uint32)
        self.earlier: Iterable[int] = ()
        self.forced: deque[int] = deque()
        self.error: str | None = None
        self._address, self._bytes = self.allowed.ctypes.data, self.allowed.nbytes
        self._matcher: LLMatcher | None = None
        self._stopped = False
        self._seconds_left = FIRST_SECONDS

    @property
    def is_ready(self) -> bool:
        """True if the grammar is compiled."""
        return self.compiled.future.done()

    @property
    def is_complete(self) -> bool:
        """True if nothing can follow."""
        return self._stopped and not self.forced

    def fill(self, banned: np.ndarray | None) -> None:
        """Computes `allowed` for the next token.

        Args:
            banned: int32 ids of tokens that may not come yet, unless no other token is allowed.
        """
        if self.compiled.is_stuck:
            self.give_up()
        if self.error is not None:
            return
        begin = time.thread_time()
        matcher = self._matcher
        if matcher is None:
            matcher = self._matcher = self.compiled.future.result(0).deep_copy()
            self._find_forced(matcher)
            for token in self.earlier:
                self.advance(int(token))
            self.earlier = ()
        if self.forced:
            self.allowed[:] = 0
            self.allowed[self.forced[0] // WORD_BITS] |= np.uint32(1 << self.forced[0] % WORD_BITS)
        else:
            matcher.unsafe_compute_mask_ptr(self._address, self._bytes)
            if banned is not None:
                self._ban(banned)
        self._count(begin)

    def advance(self, token: int) -> None:
        """Moves on by `token`, which was appended, and updates `forced`."""
        begin = time.thread_time()
        self._seconds_left = min(FIRST_SECONDS, self._seconds_left + TOKEN_SECONDS)
        if self.compiled.is_stuck:
            self.give_up()
        elif self.forced:
            self.forced.popleft()  # the matcher has consumed it already
        elif self._matcher is not None and self._matcher.consume_token(token):
            self._find_forced(self._matcher)
        self._count(begin)

    def allowed_of(self, tokens: list[int]) -> int:
        """Returns how many of `tokens` may follow, if they are appended from here on."""
        matcher = self._matcher
        if matcher is None or self.compiled.is_stuck or self.error is not None or self.forced:
            return 0
        begin = time.thread_time()
        allowed = matcher.validate_tokens(tokens)
        self._count(begin)
        return allowed

    def take_forced(self) -> list[int]:
        """Returns the tokens that must come next and clears `forced`."""
        taken = list(self.forced)
        self.forced.clear()
        return taken

    def give_up(self) -> None:
        """Stops using the matcher, because an abandoned thread still holds it."""
        self._matcher = None
        self.compiled.is_stuck = True
        self.error = TOO_SLOW

    def _ban(self, banned: np.ndarray) -> None:
        kept = self.allowed.copy()
        np.bitwise_and.at(kept, banned // WORD_BITS, ~(np.uint32(1) << (banned % WORD_BITS).astype(np.uint32)))
        if kept.any():
            self.allowed[:] = kept

    def _find_forced(self, matcher: "LLMatcher") -> None:
        """Collects the tokens that must come next and moves the matcher past them."""
        tokens = matcher.compute_ff_tokens()
        if tokens and matcher.consume_tokens(tokens):
            self.forced.extend(tokens)
        self._stopped = matcher.is_stopped()

    def _count(self, begin: float) -> None:
        """Adds this thread's CPU time since `begin` and records an error of the matcher."""
        seconds = time.thread_time() - begin
        self._seconds_left -= seconds
        self.compiled.seconds += seconds
        if self._matcher is not None and self._matcher.is_error():
            why = " ".join(self._matcher.get_error().split())[:200]
            self.error = f"the grammar cannot be followed any further: {why}; make it simpler"
        elif self._seconds_left < 0:
            self.error = TOO_SLOW

"""One sequence's place in its grammar: which tokens may come next, and which must."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

WORD_BITS = 32
# Of CPU time that a sequence may take at once, as for its first masks, and for each token in the long run; schemas take
# hundredths of a millisecond a token.
FIRST_SECONDS, TOKEN_SECONDS = 0.25, 0.002
TOO_SLOW = "the grammar takes too much time; make it simpler"


class Constraint:
    """Follows a grammar token by token.

    `allowed` is the mask of the next token, uint32 (vocabulary / 32,): bit t % 32 of word t / 32. `error` says why the
    grammar cannot be followed any further; all sequences of a step wait for its masks, so one that takes too much time
    in all is given up too. `forced` are tokens that come next and need no sampling. The matcher is the masks' thread's
    alone.
    """

    def __init__(self, compiled: "Future[LLMatcher]", vocab_size: int) -> None:
        """`compiled`: the grammar's matcher, which stays as it is: this one follows a copy."""
        self.compiled = compiled
        self.allowed = np.zeros(-(-vocab_size // WORD_BITS), np.uint32)
        self.forced: deque[int] = deque()
        self.error: str | None = None
        self._matcher: LLMatcher | None = None
        self._stopped = False
        self._seconds_left = FIRST_SECONDS

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled."""
        return self.compiled.done()

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._stopped and not self.forced

    def fill(self, banned: np.ndarray | None) -> None:
        """Makes `allowed` that of the next token. `banned`: int32, tokens that may not come yet, unless nothing else
        can.
        """
        if self.error is not None:
            return
        with self._timed():
            if self._matcher is None:
                self._matcher = self.compiled.result(0).deep_copy()
                self._find_forced()
            if self.forced:
                self.allowed[:] = 0
                self._set(self.forced[0])
                return
            self._matcher.unsafe_compute_mask_ptr(self.allowed.ctypes.data, self.allowed.nbytes)
        if banned is not None:
            kept = self.allowed.copy()
            np.bitwise_and.at(kept, banned // WORD_BITS, ~(np.uint32(1) << (banned % WORD_BITS).astype(np.uint32)))
            if kept.any():
                self.allowed[:] = kept

    def advance(self, token: int) -> None:
        """`token` was appended: `forced` is what must follow it."""
        self._seconds_left = min(FIRST_SECONDS, self._seconds_left + TOKEN_SECONDS)
        with self._timed():
            if self.forced:
                self.forced.popleft()  # which the matcher has consumed
            elif self._matcher is not None and self._matcher.consume_token(token):
                self._find_forced()

    def take_forced(self) -> list[int]:
        """The tokens that must come next, which are forgotten here."""
        taken = list(self.forced)
        self.forced.clear()
        return taken

    def give_up(self) -> None:
        """A thread has been left behind with the matcher: it is not used any more."""
        self._matcher = None
        self.error = TOO_SLOW

    def _find_forced(self) -> None:
        """The tokens that must come next; the matcher is then behind them."""
        assert self._matcher is not None
        tokens = self._matcher.compute_ff_tokens()
        if tokens and self._matcher.consume_tokens(tokens):
            self.forced.extend(tokens)
        self._stopped = self._matcher.is_stopped()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """What the matcher does meanwhile is counted, and its error noticed."""
        begin = time.thread_time()
        try:
            yield
        finally:
            self._seconds_left -= time.thread_time() - begin
            self._notice_error()

    def _set(self, token: int) -> None:
        self.allowed[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)

    def _notice_error(self) -> None:
        if self._matcher is not None and self._matcher.is_error():
            why = " ".join(self._matcher.get_error().split())[:200]
            self.error = f"the grammar cannot be followed any further: {why}; make it simpler"
        elif self._seconds_left < 0:
            self.error = TOO_SLOW

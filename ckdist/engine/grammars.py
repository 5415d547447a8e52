"""Grammars of one vocabulary: compiled in a thread, and masks of the next tokens computed in another one, beside the
step that computes their logits.

What comes here has passed `check_grammar` in a process with limits, so compiling it takes no longer than that did. What
it takes to follow it is counted (see Constraint).
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ckdist.engine.constraint import Constraint
from ckdist.engine.side_thread import Batch, SideThread
from ckdist.errors import RequestError
from ckdist.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:  # most processes meet no grammar, and llguidance takes a while to load
    from llguidance import LLMatcher

    from ckdist.engine.grammar_compiler import GrammarCompiler

MAX_KEPT = 64  # compiled grammars
MAX_KEPT_TEXT = 2 << 20  # characters of these; a compiled grammar takes up to 200 bytes for each
MASK_SECONDS = 0.5  # for one mask, which takes microseconds

_FIELD = "grammar"


class Grammars:
    """Compiles grammars and remembers the last MAX_KEPT or MAX_KEPT_TEXT. It knows the vocabulary once `prepare` was
    called, or with the first grammar.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: columns of the logits."""
        self._tokenizer = tokenizer
        self.vocab_size = min(vocab_size, tokenizer.vocab_size)  # an embedding may have more rows
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._compiler: GrammarCompiler | None = None
        self._compiling = ThreadPoolExecutor(1, "ckdist-grammars")
        self._masking = SideThread("ckdist-masks", MASK_SECONDS)

    def prepare(self) -> None:
        """Reads the vocabulary, for which it holds the GIL: 0.2 s for 50,000 tokens, 1.5 s for 260,000. To be called by
        the engine's thread before its first step, so that the threads may use all CPUs that it may.
        """
        self._compiling.submit(self._prepared).result()

    def find(self, grammar: str) -> "Future[LLMatcher]":
        """Of the compiled grammar; RequestError where llguidance refuses it, then or now."""
        from ckdist.tokens.grammar import MAX_WHOLE

        if len(grammar) > MAX_WHOLE:
            raise RequestError(f"grammar has {len(grammar)} characters; at most {MAX_WHOLE} are taken", _FIELD)
        if not self._tokenizer.eos_token_ids:
            raise RequestError("grammars need a model with a token that ends a text, and this one has none", _FIELD)
        found = self._kept.get(grammar)
        if found is None:
            self._make_room(len(grammar))
            found = self._kept[grammar] = self._compiling.submit(self._compile, grammar)
        self._kept.move_to_end(grammar)
        return found

    def _make_room(self, size: int) -> None:
        """Forgets the grammars that were not used for longest, until one of so many characters can be kept."""
        while self._kept and (len(self._kept) >= MAX_KEPT or sum(map(len, self._kept)) + size > MAX_KEPT_TEXT):
            oldest = next((key for key, future in self._kept.items() if future.done()), next(iter(self._kept)))
            del self._kept[oldest]

    def has_room(self, grammar: str) -> bool:
        """Whether `find` knows it, or fewer than MAX_KEPT grammars wait to be compiled."""
        if grammar in self._kept or len(self._kept) < MAX_KEPT:
            return True
        return any(found.done() for found in self._kept.values())

    def begin_masks(self, constraints: Sequence[tuple[Constraint, np.ndarray | None]]) -> "Masks":
        """Begins to make the masks of the next tokens; the arrays are those of `Constraint.fill`."""
        followed = [constraint for constraint, _ in constraints]
        return Masks(followed, self._masking.begin([partial(c.fill, banned) for c, banned in constraints]))

    def finish_masks(self, masks: "Masks") -> None:
        """Waits for the masks. A constraint that takes too long has an `error`."""
        for index in self._masking.finish(masks.batch):
            masks.constraints[index].give_up()

    def advance(self, moves: Sequence[tuple[Constraint, int]]) -> None:
        """Each constraint learns of its next token; one that takes too long has an `error`."""
        self.finish_masks(
            Masks([c for c, _ in moves], self._masking.begin([partial(c.advance, token) for c, token in moves]))
        )

    def _prepared(self) -> "GrammarCompiler":
        """Of the vocabulary, which is read once, in the compiling thread."""
        if self._compiler is None:
            from ckdist.engine.grammar_compiler import GrammarCompiler

            self._compiler = GrammarCompiler(self._tokenizer, self.vocab_size)
        return self._compiler

    def _compile(self, grammar: str) -> "LLMatcher":
        return self._prepared().compile(grammar)


@dataclass(frozen=True)
class Masks:
    """Work on constraints that is under way."""

    constraints: list[Constraint]
    batch: Batch

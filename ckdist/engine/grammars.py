"""Grammars of one vocabulary. One thread compiles them. Another computes the masks of next tokens during the step.

Every grammar has passed `check_grammar` in a process with limits, so compiling it takes no longer than it did there.
The time to follow it is counted (see Constraint).
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakSet

import numpy as np

from ckdist.engine.compiled_grammar import CompiledGrammar
from ckdist.engine.side_thread import SideThread
from ckdist.errors import RequestError
from ckdist.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:  # most processes need no grammar, and llguidance loads slowly
    from llguidance import LLMatcher

    from ckdist.engine.constraint import Constraint
    from ckdist.engine.grammar_compiler import GrammarCompiler

MAX_KEPT = 64  # compiled grammars
MAX_KEPT_TEXT = 2 << 20  # characters of these; a compiled grammar takes up to 200 bytes per character
# Memory grows with CPU time, by up to 300 MB a second for the grammars in tests/support/hostile_grammars.py. So these
# limits of CPU time also bound memory.
MAX_KEPT_SECONDS = 0.5  # of compiling and following all kept grammars
MAX_COMPILING_SECONDS = 1.0  # of compiling all grammars that are kept or in use
MASK_SECONDS = 0.1  # limit of CPU time for one mask, which usually takes microseconds

Masks: TypeAlias = Callable[[], None]  # masks that are being computed; waits for them
_FIELD = "grammar"


class GrammarsBusy(RequestError):  # noqa: N818, a state and no fault
    """Grammars in use leave no room for another one. It may be sent again later (HTTP 429)."""


class Grammars:
    """Compiles grammars and keeps the last ones, up to MAX_KEPT, MAX_KEPT_TEXT and MAX_KEPT_SECONDS.

    The vocabulary is read by `prepare`, or with the first grammar.

    Args:
        vocab_size: Columns of the logits.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = min(vocab_size, tokenizer.vocab_size)  # an embedding may have more rows
        self._kept: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._alive: WeakSet[CompiledGrammar] = WeakSet()  # kept, or in use by an unfinished sequence
        self._alive_lock = Lock()
        self._compiler: GrammarCompiler | None = None
        self._compiling = ThreadPoolExecutor(1, "ckdist-grammars")
        self._masking = SideThread("ckdist-masks", MASK_SECONDS)

    def prepare(self, wait: bool = True) -> None:
        """Reads the vocabulary, holding the GIL: 0.2 s for 50,000 tokens, 1.5 s for 260,000.

        The engine's thread calls it before its first step, so that the new threads may use all CPUs that it may use.
        With `wait`, it returns when the vocabulary is read.
        """
        reading = self._compiling.submit(self._prepared)
        if wait:
            reading.result()

    def find(self, grammar: str) -> CompiledGrammar:
        """Returns the compiled grammar.

        Raises RequestError if llguidance refuses the grammar, here or in the grammar's future.
        """
        from ckdist.tokens.grammar_limits import MAX_WHOLE

        if len(grammar) > MAX_WHOLE:
            raise RequestError(f"grammar has {len(grammar)} characters; at most {MAX_WHOLE} are allowed", _FIELD)
        if not self._tokenizer.eos_token_ids:
            raise RequestError("grammars need a model with a token that ends a text, and this one has none", _FIELD)
        found = self._kept.get(grammar)
        if found is None:
            self._make_room(1, len(grammar))
            found = self._kept[grammar] = CompiledGrammar(grammar)
            with self._alive_lock:
                self._alive.add(found)
            found.future = self._compiling.submit(self._compile, found)
        self._kept.move_to_end(grammar)
        return found

    def leave(self, constraint: "Constraint") -> None:
        """Ends a sequence's use of its grammar.

        The grammar is dropped if it could not be followed or there was no room for it. The oldest grammars are dropped
        if all have taken too much time.
        """
        compiled = constraint.compiled
        done = compiled.future.done()
        failed = constraint.error is not None or (done and isinstance(compiled.future.exception(), GrammarsBusy))
        if failed and self._kept.get(compiled.text) is compiled:
            del self._kept[compiled.text]
        self._make_room(0, 0)

    def _make_room(self, count: int, size: int) -> None:
        """Drops the least recently used grammars until `count` more of `size` characters fit."""
        kept = self._kept
        while kept and (
            len(kept) + count > MAX_KEPT
            or sum(map(len, kept)) + size > MAX_KEPT_TEXT
            or sum(found.seconds for found in kept.values()) > MAX_KEPT_SECONDS
        ):
            del kept[next((key for key, found in kept.items() if found.future.done()), next(iter(kept)))]

    def has_room(self, grammar: str) -> bool:
        """True if `find` knows the grammar, or fewer than MAX_KEPT grammars wait to be compiled."""
        if grammar in self._kept or len(self._kept) < MAX_KEPT:
            return True
        return any(found.future.done() for found in self._kept.values())

    def begin_masks(self, constraints: "Sequence[tuple[Constraint, np.ndarray | None]]") -> Masks:
        """Starts to compute the masks of next tokens. A constraint that takes too long gets an `error`.

        Args:
            constraints: Each with the `banned` of `Constraint.fill`.
        """
        batch = self._masking.begin([partial(c.fill, banned) for c, banned in constraints])
        return partial(self._masking.finish, batch, lambda index: constraints[index][0].give_up())

    def _prepared(self) -> "GrammarCompiler":
        """Reads the vocabulary once. Runs in the compiling thread."""
        if self._compiler is None:
            from ckdist.engine.grammar_compiler import GrammarCompiler

            self._compiler = GrammarCompiler(self._tokenizer, self.vocab_size)
        return self._compiler

    def _compiling_seconds(self) -> float:
        with self._alive_lock:
            return sum(found.compiling_seconds for found in self._alive)

    def _compile(self, grammar: CompiledGrammar) -> "LLMatcher":
        """Returns the matcher. Raises GrammarsBusy if the grammars in use take too much memory already."""
        compiler = self._prepared()
        if self._compiling_seconds() > MAX_COMPILING_SECONDS:
            raise GrammarsBusy("too many complex grammars are in use; try again later", _FIELD)
        begin = time.thread_time()
        matcher = compiler.compile(grammar.text)
        grammar.compiling_seconds = time.thread_time() - begin
        grammar.seconds += grammar.compiling_seconds
        return matcher

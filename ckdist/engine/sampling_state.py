"""The sampling state of one sequence besides its tokens. The sequence owns it, so preemption does not change it."""

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckdist.engine.grammars import Grammars
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import RequestError
from ckdist.native import CData

if TYPE_CHECKING:
    from ckdist.engine.constraint import Constraint
    from ckdist.engine.dry_breakers import DryBreakers


@dataclass
class SamplingState:
    """The sampling state of one sequence."""

    banned: np.ndarray | None = None  # int32 ids of tokens that may not be drawn yet
    breakers: Future[CData] | None = None  # a native ckdist_dry_breakers
    constraint: "Constraint | None" = None  # the sequence's position in its grammar
    mirostat_mu: float = 0.0  # bits: most surprise of the next token
    always: np.ndarray | None = None  # int32 ids of tokens that may never be drawn

    @property
    def is_ready(self) -> bool:
        """True if a token can be drawn without waiting."""
        return (self.breakers is None or self.breakers.done()) and (self.constraint is None or self.constraint.is_ready)

    @property
    def awaited(self) -> list[Future[Any]]:
        """The futures that must be done before a token can be drawn."""
        parts = (self.breakers, self.constraint and self.constraint.compiled.future)
        return [part for part in parts if part is not None and not part.done()]


def sampling_state(
    params: SamplingParams,
    eos_token_ids: Collection[int],
    vocab_size: int,
    dry_breakers: "DryBreakers | None",
    grammars: Grammars | None = None,
    always: np.ndarray | None = None,
) -> SamplingState | None:
    """The initial state of a sequence, or None if its parameters need none.

    Args:
        always: int32 ids of tokens that are never drawn.

    Raises:
        RequestError: `min_tokens` leaves no token, there is no tokenizer for breakers or a grammar, or the grammar is
            known to be wrong.
    """
    always = always if always is not None and len(always) else None
    banned, breakers, constraint = always, None, None
    if params.min_tokens:
        never = () if always is None else always.tolist()
        banned = np.array(sorted({*eos_token_ids, *params.stop_token_ids, *never}), np.int32)
        if len(banned) >= vocab_size:
            raise RequestError("min_tokens leaves no token: every one is an EOS or among stop_token_ids", "min_tokens")
    if "dry" in params.active_samplers and params.dry_sequence_breakers:
        if dry_breakers is None:
            name = "dry_sequence_breakers"
            raise RequestError(f"{name} need a tokenizer, and this engine has none; leave them empty", name)
        breakers = dry_breakers.find(params.dry_sequence_breakers)
    if params.grammar is not None:
        if grammars is None:
            raise RequestError("grammar needs a tokenizer, and this engine has none; leave it out", "grammar")
        from ckdist.engine.constraint import Constraint

        constraint = Constraint(grammars.find(params.grammar), grammars.vocab_size)
    if banned is None and breakers is None and constraint is None and not params.mirostat:
        return None
    return SamplingState(banned, breakers, constraint, float(np.float32(2 * params.mirostat_tau)), always)

"""What sampling keeps of one sequence besides its tokens. It is the sequence's own, so preemption does not touch it."""

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckdist.engine.constraint import Constraint
from ckdist.engine.dry_breakers import DryBreakers
from ckdist.engine.grammars import Grammars
from ckdist.engine.sampling import SamplingParams
from ckdist.errors import RequestError
from ckdist.native import CData


@dataclass
class SamplingState:
    """`banned`: int32, token ids that may not be drawn yet, and `always` those that never may; `breakers`: the future
    of a native ckdist_dry_breakers.

    `constraint`: the sequence's place in its grammar. `mirostat_mu`: the surprise, in bits, up to which the next token
    is drawn.
    """

    banned: np.ndarray | None = None
    breakers: Future[CData] | None = None
    constraint: Constraint | None = None
    mirostat_mu: float = 0.0
    always: np.ndarray | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a token can be drawn without waiting."""
        return (self.breakers is None or self.breakers.done()) and (self.constraint is None or self.constraint.is_ready)

    @property
    def awaited(self) -> list[Future[Any]]:
        """What must be done before a token can be drawn."""
        parts = (self.breakers, self.constraint and self.constraint.compiled.future)
        return [part for part in parts if part is not None and not part.done()]


def sampling_state(
    params: SamplingParams,
    eos_token_ids: Collection[int],
    vocab_size: int,
    dry_breakers: DryBreakers | None,
    grammars: Grammars | None = None,
    always: np.ndarray | None = None,
) -> SamplingState | None:
    """The state that a sequence begins with; None where its parameters need none. `always`: int32, tokens that are
    never drawn.

    Raises RequestError where `min_tokens` leaves no token to draw, for breakers or a grammar without a tokenizer, and
    for a grammar that is known to be wrong.
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
        constraint = Constraint(grammars.find(params.grammar), grammars.vocab_size)
    if banned is None and breakers is None and constraint is None and not params.mirostat:
        return None
    return SamplingState(banned, breakers, constraint, float(np.float32(2 * params.mirostat_tau)), always)

"""One request's tokens and where their keys and values lie.

It decides nothing: the scheduler moves it, the engine extends it.
"""

from collections.abc import Hashable
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ckdist.engine.block_pool import ONE_TENANT
from ckdist.engine.pooling import Pooling
from ckdist.engine.sampling import SamplingParams
from ckdist.engine.state_pool import SequenceState
from ckdist.program.batch import BLOCK_TOKENS

if TYPE_CHECKING:  # a simulation schedules sequences and needs neither grammars nor vocabularies
    from ckdist.engine.request import Tokens
    from ckdist.engine.sampling_state import SamplingState


class State(Enum):
    """Where the scheduler has a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """A prompt and its continuation.

    Of its `length` tokens the first `computed` have keys and values in the blocks of `block_table[:num_blocks]`; the
    first `shared_blocks` of these are full and known to the pool, for others to reuse. `scored` counts the prompt
    positions whose logits need not be asked for (again): all but the last where no prompt logprobs are wanted.
    `sampling_state` is None where its parameters need none (any more). `in_flight` counts the steps with a chunk of it
    that are issued and whose results have not come. With a `pooling` hidden states are wanted in place of logits, and
    nothing is sampled. `first_text`: of a prompt of two texts the tokens of the first, else 0. It takes over blocks of
    its `tenant` alone, and leaves its own to that; with None it does neither.

    With a `source` the prompt is where decoding begins, and an encoder reads the source before: `encoded` says that it
    has. The blocks are then for both, source and sequence, position by position.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "cached_from",
        "cached_tokens",
        "computed",
        "encoded",
        "first_text",
        "id",
        "in_flight",
        "length",
        "num_blocks",
        "params",
        "pooling",
        "prompt",
        "prompt_logprobs",
        "sampling_state",
        "scored",
        "seed",
        "shared_blocks",
        "source",
        "state",
        "state_slots",
        "tenant",
        "tokens",
    )  # fmt: skip

    def __init__(
        self, id: Hashable, prompt: "Tokens", params: SamplingParams, seed: int, capacity: int, arrival: float,
        sampling_state: "SamplingState | None" = None, pooling: Pooling | None = None, first_text: int = 0,
        source: np.ndarray | None = None, tenant: bytes | None = ONE_TENANT,
    ) -> None:  # fmt: skip
        """`capacity`: the most tokens, prompt and output together, that it may ever have."""
        self.id, self.params, self.seed, self.arrival = id, params, seed, arrival
        self.sampling_state, self.pooling, self.first_text = sampling_state, pooling, first_text
        self.tenant = tenant
        self.state = State.WAITING
        self.tokens = np.empty(capacity, np.int32)  # (capacity,) prompt, then output
        self.tokens[: len(prompt)] = prompt
        self.prompt = self.tokens[: len(prompt)]
        self.length = len(prompt)
        self.computed = self.in_flight = 0
        self.source, self.encoded = source, False
        if source is not None:
            self.first_text = len(source)
        self.block_table = np.empty(-(-max(capacity, self.first_text) // BLOCK_TOKENS), np.int32)
        self.num_blocks = 0
        self.shared_blocks = 0
        self.state_slots: SequenceState | None = None  # while it runs, where layers keep states
        self.cached_tokens: int | None = None  # prompt tokens found in the cache when it was first admitted
        self.cached_from = 0  # tokens of the sequence that left them there
        scores = params.prompt_logprobs is not None
        self.scored = 0 if scores or (pooling is not None and pooling.needs_all) else len(prompt) - 1
        self.prompt_logprobs: list[Any] | None = [None] if scores else None  # nothing comes before the first token

    def append(self, token: int) -> None:
        """Adds a token to the output; there is room for it."""
        self.tokens[self.length] = token
        self.length += 1

    @property
    def wants_hidden(self) -> bool:
        """Whether its next step is one that makes hidden states: for a vector, or for what decoding attends to."""
        return self.pooling is not None or (self.source is not None and not self.encoded)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the request's prompt."""
        return len(self.prompt if self.source is None else self.source)

    @property
    def blocks(self) -> int:
        """Blocks that its tokens need, and what an encoder reads."""
        positions = self.length if self.source is None else max(self.length, len(self.source))
        return -(-positions // BLOCK_TOKENS)

    @property
    def is_ready(self) -> bool:
        """Whether it can begin (again): sampling has what it needs, and no token is awaited."""
        return not self.in_flight and (self.sampling_state is None or self.sampling_state.is_ready)

    @property
    def output(self) -> np.ndarray:
        """The tokens after the prompt: int32 (length - prompt,)."""
        return self.tokens[len(self.prompt) : self.length]

    @property
    def scoring(self) -> bool:
        """Whether prompt logprobs, or the hidden states of all tokens, are still to be computed."""
        return self.scored < len(self.prompt) - 1

    @property
    def reusable(self) -> int:
        """How many leading tokens may come from the cache: the last token's logits, and those to be scored, must be
        computed.
        """
        return self.scored if self.scoring else self.length - 1

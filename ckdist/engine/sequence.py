"""One request's tokens and the blocks of their keys and values.

It decides nothing: the scheduler moves it, and the engine extends it.
"""

from collections.abc import Hashable
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from ckdist.engine.prefix_use import CacheUse
from ckdist.engine.queue_place import ANY_PLACE, QueuePlace
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.sequence_state import SequenceState
from ckdist.engine.tenant import ONE_TENANT
from ckdist.program.step_batch import BLOCK_TOKENS

if TYPE_CHECKING:  # a simulation schedules sequences and needs neither grammars nor vocabularies
    from ckdist.engine.drafter import Drafter
    from ckdist.engine.named_adapters import AdapterUse
    from ckdist.engine.pooling import Pooling
    from ckdist.engine.request import Tokens
    from ckdist.engine.sampling_state import SamplingState


GENERATED = 1 << 30  # marks generated tokens in names of blocks; no vocabulary is so large


class State(Enum):
    """The scheduler's state of a sequence."""

    WAITING = "waiting"
    LOADING = "loading"  # a prefix of it is read from disk
    RUNNING = "running"
    FINISHED = "finished"


def delta_of(positions: np.ndarray) -> int:
    """`Sequence.position_delta`: a generated token has the position after the largest one of the prompt."""
    return int(positions.max()) + 1 - len(positions)


class Sequence:
    """A prompt and its continuation.

    The first `computed` of its `length` tokens have keys and values in the blocks `block_table[:num_blocks]`.

    With a `source`, an encoder reads the source first, and the prompt is the beginning of decoding. Source and sequence
    then share the blocks, position by position.

    Args:
        capacity: Most tokens, prompt and output together, that it may ever have.
        place: Its queue, and its order there.

    Attributes:
        shared_blocks: Leading blocks that are full and known to the pool, so that others can reuse them.
        scored: Leading prompt positions whose logits are not needed (any more): all but the last without prompt
            logprobs.
        sampling_state: None if the parameters need none (any more).
        in_flight: Issued steps with a chunk of it that are not collected.
        pooling: If set, hidden states are wanted in place of logits, and nothing is sampled.
        first_text: Tokens of the first text if the prompt has two; with a source its tokens; else 0.
        first_turn: Tokens of a conversation's first turn if other conversations may share it; else 0.
        last_turn: Tokens up to the end of the prompt's last turn; 0 if there is none.
        tenant: Blocks are reused and left only within a tenant. None: neither.
        adapters: The adapters that it runs with, in the order of their sum.
        positions: Positions of the prompt's tokens in time, height and width, int32 (prompt, 3). None: their places.
        position_delta: Position of a generated token, on all three axes, minus its place in the sequence.
        encoded: Whether the encoder has read the source.
        number: Its order of arrival in the queue; 0 before that.
        refused_at: Blocks that were available when it was last refused for want of blocks; -1: it was not.
        refused_since: Time of the first such refusal.
        resumes: It came with tokens of its answer, which another engine has drawn, and was not preempted since.
        drafter: Guesses its next tokens, once it has decoded with drafts.
    """

    __slots__ = (
        "adapters",
        "arrival",
        "block_table",
        "cache_use",
        "cached_from",
        "cached_tokens",
        "computed",
        "drafter",
        "encoded",
        "first_text",
        "first_turn",
        "id",
        "in_flight",
        "last_turn",
        "length",
        "num_blocks",
        "number",
        "params",
        "place",
        "pooling",
        "position_delta",
        "positions",
        "prompt",
        "prompt_logprobs",
        "refused_at",
        "refused_since",
        "resumes",
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
        sampling_state: "SamplingState | None" = None, pooling: "Pooling | None" = None, first_text: int = 0,
        source: np.ndarray | None = None, tenant: bytes | None = ONE_TENANT,
        place: QueuePlace = ANY_PLACE, positions: np.ndarray | None = None,
        turn_ends: tuple[int, int] = (0, 0), adapters: "tuple[AdapterUse, ...]" = (),
    ) -> None:  # fmt: skip
        self.id, self.params, self.seed, self.arrival = id, params, seed, arrival
        self.sampling_state, self.pooling, self.first_text = sampling_state, pooling, first_text
        self.first_turn, self.last_turn = turn_ends
        self.tenant = tenant
        self.place, self.number, self.adapters = place, 0, adapters
        self.refused_at, self.refused_since = -1, 0.0
        self.resumes = False
        self.drafter: Drafter | None = None
        self.state = State.WAITING
        self.tokens = np.empty(capacity, np.int32)  # (capacity,) prompt, then output
        self.tokens[: len(prompt)] = prompt
        self.prompt = self.tokens[: len(prompt)]
        self.length = len(prompt)
        self.computed = self.in_flight = 0
        self.positions = positions
        self.position_delta = 0 if positions is None else delta_of(positions)
        self.source, self.encoded = source, False
        if source is not None:
            self.first_text = len(source)
        self.block_table = np.empty(-(-max(capacity, self.first_text) // BLOCK_TOKENS), np.int32)
        self.num_blocks = 0
        self.shared_blocks = 0
        self.state_slots: SequenceState | None = None  # while it runs, if layers keep states
        self.cached_tokens: int | None = None  # prompt tokens found in the cache when it was first admitted
        self.cached_from = 0  # tokens of the sequence that left them there
        self.cache_use = CacheUse()
        scores = params.prompt_logprobs is not None
        self.scored = 0 if scores or (pooling is not None and pooling.needs_all) else len(prompt) - 1
        self.prompt_logprobs: list[Any] | None = [None] if scores else None  # nothing comes before the first token

    def append(self, token: int) -> None:
        """Adds a token to the output. There must be room for it."""
        self.tokens[self.length] = token
        self.length += 1

    def named(self, begin: int, end: int) -> np.ndarray:
        """The tokens [begin, end) as names of blocks have them: int32, with generated ones marked."""
        tokens = self.tokens[begin:end]
        if end > len(self.prompt):
            tokens = tokens.copy()
            tokens[max(len(self.prompt) - begin, 0) :] |= GENERATED
        return tokens

    def positions_of(self, first: int, tokens: int) -> np.ndarray:
        """The positions of the tokens [first, first + tokens): int32 (tokens, 3)."""
        places = np.arange(first, first + tokens, dtype=np.int32)[:, None]
        found = np.repeat(places + np.int32(self.position_delta), 3, axis=1)
        if self.positions is not None and first < len(self.positions):
            given = self.positions[first : first + tokens]
            found[: len(given)] = given
        return found

    @property
    def reads_prompt(self) -> bool:
        """True if its next token to compute belongs to the prompt."""
        return self.computed < len(self.prompt)

    @property
    def wants_hidden(self) -> bool:
        """True if its next step makes hidden states, for a vector or for decoding to attend to."""
        return self.pooling is not None or (self.source is not None and not self.encoded)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the request's prompt."""
        return len(self.prompt if self.source is None else self.source)

    @property
    def blocks(self) -> int:
        """Blocks that its tokens and its source need."""
        positions = self.length if self.source is None else max(self.length, len(self.source))
        return -(-positions // BLOCK_TOKENS)

    @property
    def is_ready(self) -> bool:
        """True if it can begin (again): sampling has all it needs, and no step of it is under way."""
        return not self.in_flight and (self.sampling_state is None or self.sampling_state.is_ready)

    @property
    def output(self) -> np.ndarray:
        """The tokens after the prompt: int32 (length - prompt,)."""
        return self.tokens[len(self.prompt) : self.length]

    @property
    def scoring(self) -> bool:
        """True if prompt logprobs, or the hidden states of all tokens, are not complete yet."""
        return self.scored < len(self.prompt) - 1

    @property
    def reusable(self) -> int:
        """Leading tokens that may come from the cache. The last token and tokens to be scored must be computed."""
        return self.scored if self.scoring else self.length - 1

    @property
    def final(self) -> int:
        """Leading computed positions that are never computed again while it runs: all but those of drafts."""
        return min(self.computed, self.length)


def shared_blocks(sequence: Sequence, running: Sequence) -> int:
    """Full blocks that `sequence` could reuse from `running` while that computes its prompt; 0 after that."""
    if sequence.tenant is None or sequence.tenant != running.tenant:
        return 0
    end = min(sequence.reusable, running.length)
    if running.length - running.computed <= 1 or end < BLOCK_TOKENS:
        return 0
    differs = sequence.tokens[:end] != running.tokens[:end]
    first = int(differs.argmax())
    return (first if differs[first] else end) // BLOCK_TOKENS

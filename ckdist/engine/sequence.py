"""One request's tokens and the blocks of their keys and values.

It decides nothing: the scheduler moves it, and the engine extends it.
"""

from collections.abc import Hashable
from dataclasses import InitVar, dataclass, field
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


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """A prompt and its continuation.

    The first `computed` of its `length` tokens have keys and values in the blocks `block_table[:num_blocks]`.

    With a `source`, an encoder reads the source first, and the prompt is the beginning of decoding. Source and sequence
    then share the blocks, position by position.

    Args:
        given: The prompt.
        capacity: Most tokens, prompt and output together, that it may ever have.
        turn_ends: Its `first_turn` and `last_turn`.
    """

    id: Hashable
    given: InitVar["Tokens"]
    params: SamplingParams
    seed: int
    capacity: InitVar[int]
    arrival: float
    sampling_state: "SamplingState | None" = None  # None if the parameters need none (any more)
    pooling: "Pooling | None" = None  # if set, hidden states are wanted in place of logits, and nothing is sampled
    first_text: int = 0  # tokens of the first text if the prompt has two; with a source its tokens; else 0
    source: np.ndarray | None = None
    tenant: bytes | None = ONE_TENANT  # blocks are reused and left only within a tenant; None: neither
    place: QueuePlace = ANY_PLACE  # its queue, and its order there
    positions: np.ndarray | None = None  # of the prompt in time, height and width, int32 (prompt, 3); None: its places
    turn_ends: InitVar[tuple[int, int]] = (0, 0)
    adapters: "tuple[AdapterUse, ...]" = ()  # those that it runs with, in the order of their sum

    tokens: np.ndarray = field(init=False)  # (capacity,) prompt, then output
    prompt: np.ndarray = field(init=False)
    length: int = field(init=False)
    computed: int = field(default=0, init=False)
    scored: int = field(init=False)  # leading positions of the prompt whose logits are not needed (any more)
    prompt_logprobs: list[Any] | None = field(default=None, init=False)
    block_table: np.ndarray = field(init=False)
    num_blocks: int = field(default=0, init=False)
    shared_blocks: int = field(default=0, init=False)  # leading full blocks that the pool knows, for others to reuse
    state_slots: "SequenceState | None" = field(default=None, init=False)  # while it runs, if layers keep states
    state: State = field(default=State.WAITING, init=False)
    in_flight: int = field(default=0, init=False)  # issued steps with a chunk of it that are not collected
    encoded: bool = field(default=False, init=False)  # the encoder has read the source
    first_turn: int = field(init=False)  # tokens of a conversation's first turn if others may share it; else 0
    last_turn: int = field(init=False)  # tokens up to the end of the prompt's last turn; 0 if there is none
    position_delta: int = field(init=False)  # position of a generated token, on all axes, minus its place
    number: int = field(default=0, init=False)  # its order of arrival in the queue; 0 before that
    refused_at: int = field(default=-1, init=False)  # blocks available when it was last refused for want of them; or -1
    refused_since: float = field(default=0.0, init=False)  # time of the first such refusal
    # It came with tokens of its answer, which another engine has drawn, and was not preempted since.
    resumes: bool = field(default=False, init=False)
    drafter: "Drafter | None" = field(default=None, init=False)  # guesses its next tokens, once it decodes with drafts
    cached_tokens: int | None = field(default=None, init=False)  # of the prompt, found when it was first admitted
    cached_from: int = field(default=0, init=False)  # tokens of the sequence that left them there
    cache_use: CacheUse = field(default_factory=CacheUse, init=False)

    def __post_init__(self, given: "Tokens", capacity: int, turn_ends: tuple[int, int]) -> None:
        self.tokens = np.empty(capacity, np.int32)
        self.tokens[: len(given)] = given
        self.prompt = self.tokens[: len(given)]
        self.length = len(given)
        self.first_turn, self.last_turn = turn_ends
        self.position_delta = 0 if self.positions is None else delta_of(self.positions)
        if self.source is not None:
            self.first_text = len(self.source)
        self.block_table = np.empty(-(-max(capacity, self.first_text) // BLOCK_TOKENS), np.int32)
        scores = self.params.prompt_logprobs is not None
        self.scored = 0 if scores or (self.pooling is not None and self.pooling.needs_all) else len(given) - 1
        if scores:
            self.prompt_logprobs = [None]  # nothing comes before the first token

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

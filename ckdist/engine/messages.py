"""Every message between the HTTP process and rank 0: records, as msgpack maps over pyzmq.

`read` checks sizes and types. The engine checks sampling parameters, prompts and pooling against the model.
"""

import operator
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, field
from msgspec.msgpack import Decoder, Encoder

from ckdist.engine.prefix_use import CacheUse
from ckdist.engine.queue_place import ANY_PLACE, QueuePlace
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.tenant import ONE_TENANT
from ckdist.engine.typed_records import Kind, Message, Record, decode
from ckdist.errors import RequestError

MAX_MESSAGE_BYTES = 64 << 20
STALE_SECONDS = 5.0
WATCH_SECONDS = 3.0  # after the last `watch`
MAX_ID_CHARS = 200
MAX_TENANT_BYTES = 64
MAX_ADAPTER_SCALE = 1000.0
MAX_ADAPTERS = 8  # of a request
TOKEN_BYTES = 4

Id = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
AdapterName = Annotated[str, Meta(max_length=MAX_ID_CHARS)]
AdapterScale = Annotated[float, Meta(ge=-MAX_ADAPTER_SCALE, le=MAX_ADAPTER_SCALE)]
AdapterScales = Annotated[tuple[tuple[AdapterName, AdapterScale], ...], Meta(max_length=MAX_ADAPTERS)]
Tenant = Annotated[bytes, Meta(max_length=MAX_TENANT_BYTES)] | None
State = Annotated[str, Meta(pattern=r"\A(loading|ready|draining|failed)\Z")]
FinishReason = Annotated[str, Meta(pattern=r"\A(stop|length|abort)\Z")] | None
LogprobsEntry: TypeAlias = list[Any]  # [chosen_logprob, [[token, logprob], ...]]


class Hello(Message, frozen=True):
    """The first message of a process: earlier requests under its name end."""


class Submit(Message, frozen=True):
    """Continue a prompt. EOS and stop tokens are not among the tokens that come back. The client finds stop strings.

    `drawn`: tokens of the answer that an earlier engine drew; this one goes on after them.
    """

    id: Id
    prompt: bytes  # see `pack_tokens`
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: Tenant = ONE_TENANT  # only cached blocks of this tenant are reused; null: none are reused or left
    place: QueuePlace = ANY_PLACE
    drawn: bytes = b""
    adapters: AdapterScales = ()  # the answer has the sum of these

    def __post_init__(self) -> None:
        check_tokens(self.prompt, self.drawn)


class Embed(Message, frozen=True):
    """Return the vector of a prompt."""

    id: Id
    prompt: bytes
    pooling: str  # of `ckdist.engine.pooling`
    first_text: int = 0  # tokens of the first text if the prompt has two
    tenant: Tenant = ONE_TENANT
    place: QueuePlace = ANY_PLACE

    def __post_init__(self) -> None:
        check_tokens(self.prompt)


class LoadAdapter(Message, frozen=True):
    """Load an adapter from a folder on every host. The answer is Done or Failure."""

    id: Id
    name: AdapterName
    folder: str
    replaces: bool = False  # the name may be in use


class UnloadAdapter(Message, frozen=True):
    """Forget an adapter. Requests with it go on. The answer is Done or Failure."""

    id: Id
    name: AdapterName


class Abort(Message, frozen=True):
    """End a request."""

    id: Id


class Watch(Message, frozen=True):
    """A client watches the machine: for WATCH_SECONDS the status has `ranks`."""


class Drain(Message, frozen=True):
    """Finish accepted requests, refuse new ones, then end."""


class Status(Message, frozen=True):
    """Sent on every change and at least once a second. Its absence for STALE_SECONDS means that the engine is stuck."""

    state: State
    error: str | None = None
    model: dict[str, Any] = field(default_factory=dict[str, Any])  # vocab_size and context_length once ready
    stats: dict[str, int | float | str] = field(default_factory=dict[str, int | float | str])
    ranks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # one per rank while a client watches
    adapters: dict[str, int] | None = None  # ids of the adapters by name; None: there are no places for adapters
    clock: float = 0.0  # seconds, when `stats` were read


class PromptScores(Record, frozen=True, dict=True):  # dict: for the cached property
    """A prompt's log probabilities as blocks of numbers, since millions are too many to unpack at once.

    All tokens but the first have a score and `width` alternatives. Raises ValueError if the sizes do not agree.
    """

    width: int
    chosen: bytes  # float64
    tokens: bytes  # int32
    logprobs: bytes  # float64

    def __post_init__(self) -> None:
        chosen, tokens, logprobs = self._columns
        if not len(tokens) == len(logprobs) == self.width * len(chosen):
            raise ValueError(f"{len(chosen)} scores with {len(tokens)} alternatives, not {self.width} each")

    @classmethod
    def pack(cls, entries: list[Any]) -> "PromptScores":
        """Packs a LogprobsEntry per token, None for the first. All have equally many alternatives."""
        scored = entries[1:]
        width = len(scored[0][1]) if scored else 0
        tops = [pair for _, top in scored for pair in top]
        columns = (
            array("d", [entry[0] for entry in scored]),
            array("i", [i for i, _ in tops]),
            array("d", [p for _, p in tops]),
        )
        return cls(width, *(column.tobytes() for column in columns))

    @cached_property
    def _columns(self) -> "tuple[memoryview[Any], memoryview[Any], memoryview[Any]]":
        return memoryview(self.chosen).cast("d"), memoryview(self.tokens).cast("i"), memoryview(self.logprobs).cast("d")

    def __len__(self) -> int:
        return len(self._columns[0]) + 1

    def __getitem__(self, index: int) -> LogprobsEntry | None:
        if index == 0:
            return None
        chosen, tokens, logprobs = self._columns
        begin, end = (index - 1) * self.width, index * self.width
        return [chosen[index - 1], [list(pair) for pair in zip(tokens[begin:end], logprobs[begin:end], strict=True)]]


class Tokens(Message, frozen=True):
    """New tokens of a request."""

    id: str
    tokens: list[int]
    finish_reason: FinishReason = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cached_from: int = 0  # length of the sequence that left the cached tokens; 0 if there are none
    logprobs: list[LogprobsEntry] | None = None  # one per token
    prompt_logprobs: PromptScores | None = None  # with the first tokens
    stop_token: int | None = None  # the one of `stop_token_ids` that ended the request
    cache_use: CacheUse | None = None  # with the first tokens


class Embedding(Message, frozen=True):
    """The vector of a prompt."""

    id: str
    vector: bytes  # float32, little-endian
    prompt_tokens: int
    cached_tokens: int

    def __post_init__(self) -> None:
        if not self.vector or len(self.vector) % 4:
            raise RequestError("vector must be float32 bytes", "vector")


class Done(Message, frozen=True):
    """An adapter was loaded or unloaded."""

    id: str


class Failure(Message, frozen=True, tag="error"):
    """A request has failed, or a message was wrong, which then may have no id."""

    id: str | None
    message: str
    field: str | None = None
    status: int = 500  # an HTTP status: 400, 429, 500, 503
    ends_engine: bool = False  # the engine ends as well, so another one may continue the request


class Envelope(Record, frozen=True, forbid_unknown_fields=False):
    """Fields of a message to rank 0 that are read first: the id of a wrong message, and names that msgspec skips."""

    id: Any = None
    sampling: Any = None

    @property
    def request(self) -> str | None:
        """The id of the request, if it is valid."""
        return self.id if isinstance(self.id, str) and 1 <= len(self.id) <= MAX_ID_CHARS else None

    def check_sampling(self) -> None:
        """Raises RequestError if a sampling parameter is unknown. `read` skips unknown fields of a dataclass."""
        for name in self.sampling or ():
            if name not in SAMPLING_FIELDS:
                raise RequestError(f"unknown sampling field {name[:100]!r}", "sampling")


ToRank0: TypeAlias = Hello | Submit | Embed | Abort | LoadAdapter | UnloadAdapter | Watch | Drain
FromRank0: TypeAlias = Status | Tokens | Embedding | Done | Failure
SAMPLING_FIELDS = frozenset(item.name for item in fields(SamplingParams))
ENVELOPE = Decoder(Envelope)
TO_RANK_0 = Decoder[ToRank0](ToRank0)
FROM_RANK_0 = Decoder[FromRank0](FromRank0)
encode = Encoder(enc_hook=operator.methodcaller("item")).encode  # the hook: of NumPy's scalars


def read(data: bytes, decoder: Decoder[Kind]) -> Kind:
    """Decodes a message. Raises RequestError that names a wrong field."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise RequestError(f"message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
    return decode(decoder, data)


def check_tokens(*prompts: bytes) -> None:
    """Raises RequestError if a prompt is not as `pack_tokens` returns it."""
    if any(len(prompt) % TOKEN_BYTES for prompt in prompts):
        raise RequestError("prompt must be token ids as int32 bytes", "prompt")


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Returns token ids as little-endian int32."""
    return array("i", tokens).tobytes()


def unpack_tokens(prompt: bytes) -> Sequence[int]:
    """Inverse of `pack_tokens`, without a copy."""
    return memoryview(prompt).cast("i")

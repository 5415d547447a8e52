"""Every message between the HTTP process and rank 0: records, as msgpack maps over pyzmq.

A message is a map: `op`, the record's name in TO_RANK_0 or FROM_RANK_0, and the fields that differ from their
defaults. `read` checks sizes and types; the engine checks sampling parameters, prompts and pooling against the model.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, TypeAlias

import msgpack

from ckdist.engine.block_pool import ONE_TENANT
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.typed_map import Record, Rule, from_map, to_map
from ckdist.errors import RequestError

MAX_MESSAGE_BYTES = 64 << 20
STALE_SECONDS = 5.0
WATCH_SECONDS = 3.0  # after the last `watch`
MAX_ID_CHARS = 200
MAX_TENANT_BYTES = 64
TOKEN_BYTES = 4
STATES = ("loading", "ready", "draining", "failed")
FINISH_REASONS = (None, "stop", "length", "abort")

Id = Annotated[str, Rule(f"a string of 1 to {MAX_ID_CHARS} characters", lambda text: 1 <= len(text) <= MAX_ID_CHARS)]
TokenBytes = Annotated[bytes, Rule("token ids as int32 bytes", lambda data: len(data) % TOKEN_BYTES == 0)]
Tenant = Annotated[
    bytes | None,
    Rule(f"at most {MAX_TENANT_BYTES} bytes, or null", lambda name: name is None or len(name) <= MAX_TENANT_BYTES),
]
State = Annotated[str, Rule(f"one of {', '.join(STATES)}", lambda state: state in STATES)]
FinishReason = Annotated[str | None, Rule("null, stop, length or abort", lambda reason: reason in FINISH_REASONS)]
Vector = Annotated[bytes, Rule("float32 bytes", lambda data: len(data) > 0 and len(data) % 4 == 0)]
LogprobsEntry: TypeAlias = list[Any]  # [chosen_logprob, [[token, logprob], ...]]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a process: earlier requests under its name end."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Continue a prompt. EOS and stop tokens are not among the tokens that come back. The client finds stop strings."""

    id: Id
    prompt: TokenBytes  # little-endian
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: Tenant = ONE_TENANT  # only cached blocks of this tenant are reused; null: none are reused or left


@dataclass(frozen=True, slots=True)
class Embed:
    """Return the vector of a prompt."""

    id: Id
    prompt: TokenBytes
    pooling: str  # of `ckdist.engine.pooling`
    first_text: int = 0  # tokens of the first text if the prompt has two
    tenant: Tenant = ONE_TENANT


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request."""

    id: Id


@dataclass(frozen=True, slots=True)
class Watch:
    """A client watches the machine: for WATCH_SECONDS the status has `ranks`."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish accepted requests, refuse new ones, then end."""


@dataclass(frozen=True, slots=True)
class Status:
    """Sent on every change and at least once a second. Its absence for STALE_SECONDS means that the engine is stuck."""

    state: State
    error: str | None = None
    model: dict[str, Any] = field(default_factory=dict[str, Any])  # vocab_size and context_length once ready
    stats: dict[str, float | str] = field(default_factory=dict[str, float | str])
    ranks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # one per rank while a client watches
    clock: float = 0.0  # seconds, when `stats` were read


@dataclass(frozen=True)
class PromptScores:
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


@dataclass(slots=True)  # not frozen: that takes 0.5 us more for each token
class Tokens:
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


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of a prompt."""

    id: str
    vector: Vector  # little-endian
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A request has failed, or a message was wrong, which then may have no id."""

    id: str | None
    message: str
    field: str | None = None
    status: int = 500  # an HTTP status: 400, 429, 500, 503


TO_RANK_0 = {"hello": Hello, "submit": Submit, "embed": Embed, "abort": Abort, "watch": Watch, "drain": Drain}
FROM_RANK_0 = {"status": Status, "tokens": Tokens, "embedding": Embedding, "error": Failure}
ToRank0: TypeAlias = Hello | Submit | Embed | Abort | Watch | Drain
FromRank0: TypeAlias = Status | Tokens | Embedding | Failure
_OPS = {kind: op for op, kind in (TO_RANK_0 | FROM_RANK_0).items()}


def encode(message: ToRank0 | FromRank0) -> bytes:
    """Encodes a message."""
    fields = to_map(message)
    fields["op"] = _OPS[type(message)]
    data = msgpack.packb(fields, use_bin_type=True)
    assert data is not None  # a Packer that flushes itself returns bytes
    return data


def unpack(data: bytes) -> dict[str, Any]:
    """Unpacks a message, whose fields are not checked yet.

    Raises RequestError if it is too large, or not a map with a string `op`.
    """
    try:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}")
        message = msgpack.unpackb(data, raw=False, strict_map_key=False)
        if not isinstance(message, dict) or not isinstance(message.get("op"), str):
            raise ValueError("a message is a map with a string 'op'")
    # msgpack's own errors are ValueErrors
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise RequestError(f"message is not valid: {str(error)[:200]}") from None
    return message


def read(message: dict[str, Any], kinds: Mapping[str, type[Record]]) -> Record:
    """Returns an unpacked message, which it changes, as a record of one of `kinds`.

    Raises RequestError that names a wrong field.
    """
    op = message.pop("op")
    if op not in kinds:
        raise RequestError(f"unknown op {op[:40]!r}; the known ones are {', '.join(kinds)}", "op")
    return from_map(kinds[op], message, op)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Returns token ids as little-endian int32."""
    return array("i", tokens).tobytes()


def unpack_tokens(prompt: bytes) -> Sequence[int]:
    """Inverse of `pack_tokens`, without a copy."""
    return memoryview(prompt).cast("i")

"""A request that is ready for the engine, and what preparing it needs to know of the model."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckdist.engine.sampling import SamplingParams
from ckdist.errors import RequestError
from ckdist.serve.parsers.form import AnswerForm

TOKEN_BYTES = 4


@dataclass(frozen=True)
class ModelFacts:
    """`vocab_size` counts the rows of the embedding (a tokenizer may know fewer tokens); `context_length` is the tokens
    that a prompt and its output may have in all. With `strict_fields` a field that nobody knows is refused. `scores`:
    of a cross-encoder what makes scores of what comes out, sigmoid or identity; "" of any other model. `encodes`: an
    encoder reads prompts, and what follows is no continuation of them. `special_in_text`: control tokens that stand in
    the text of messages are such tokens.
    """

    name: str
    vocab_size: int
    context_length: int
    strict_fields: bool = False
    scores: str = ""
    encodes: bool = False
    special_in_text: bool = False

    def check_continues(self, what: str) -> None:
        """RequestError where what follows a prompt does not go on with it, which `what` would need."""
        if self.encodes:
            raise RequestError(f"the model has an encoder, and no {what}; use /v1/completions", "model")


@dataclass(frozen=True)
class Prepared:
    """`n` choices for each of `prompts`; choice number `i` continues prompt `i // n`.

    A prompt is its token ids as int32, little-endian (see `pack_tokens`). `max_tokens` has one entry per prompt.
    `texts` has the prompts as text where the answer holds them; with `echo` the text of each choice begins with its
    own. `include_stop`: a stop string is given out too; `skip_special`: special tokens are not. `token_ids`,
    `timings_per_token`, `continuous_usage`: what pieces of the answer carry besides their text. `response_fields` are
    the parts of the answer that are wanted, none for all. `ignored` has names of fields that nobody knows,
    `skipped` the types of tools that are left out. `answer`:
    how a chat's answer is taken apart; None where it is text alone. `echoed`: fields of the request that the answer
    repeats. `cache_salt`, `cache_prompt`: see `read_cache_use`.
    """

    prompts: list[bytes]
    max_tokens: list[int]
    sampling: SamplingParams
    n: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool = False
    texts: tuple[str, ...] = ()
    continuous_usage: bool = False
    include_stop: bool = False
    skip_special: bool = True
    token_ids: bool = False
    timings_per_token: bool = False
    response_fields: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    answer: AnswerForm | None = None
    cache_salt: str | None = None
    cache_prompt: bool = True
    echoed: dict[str, Any] = field(default_factory=dict[str, Any])

    def prompt_tokens(self, choice: int) -> list[int]:
        """The token ids that choice number `choice` continues."""
        return list(unpack_tokens(self.prompts[choice // self.n]))

    def prompt_length(self, choice: int) -> int:
        """How many tokens choice number `choice` continues."""
        return len(self.prompts[choice // self.n]) // TOKEN_BYTES

    def to_map(self) -> dict[str, Any]:
        """For another process, as msgpack takes it."""
        return asdict(self)

    @classmethod
    def from_map(cls, fields: dict[str, Any]) -> Prepared:
        """The way back of `to_map`."""
        sampling = SamplingParams(**_with_tuples(fields["sampling"], SamplingParams))
        answer = None if fields["answer"] is None else AnswerForm.from_map(fields["answer"])
        return cls(**{**_with_tuples(fields, cls), "sampling": sampling, "answer": answer})


def _with_tuples(values: dict[str, Any], kind: type) -> dict[str, Any]:
    """Msgpack knows lists alone."""
    tuples = {item.name for item in dataclasses.fields(kind) if str(item.type).startswith("tuple")}
    return {key: tuple(item) if key in tuples and isinstance(item, list) else item for key, item in values.items()}


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as int32, little-endian."""
    return array("i", tokens).tobytes()


def unpack_tokens(prompt: bytes) -> Sequence[int]:
    """The way back of `pack_tokens`, without a copy."""
    return memoryview(prompt).cast("i")

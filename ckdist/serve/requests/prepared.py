"""A request that is ready for the engine, and the facts about the model that are needed to prepare it."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import RequestError
from ckdist.serve.parsers.form import AnswerForm

TOKEN_BYTES = 4


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model and the server."""

    name: str
    vocab_size: int  # rows of the embedding; a tokenizer may know fewer tokens
    context_length: int  # maximum of prompt and output tokens together
    strict_fields: bool = False  # refuse unknown fields
    scores: str = ""  # a cross-encoder's function from its output to scores: sigmoid or identity; else ""
    encodes: bool = False  # an encoder reads prompts, and the output does not continue them
    special_in_text: bool = False  # control tokens in texts of messages count as such

    def check_continues(self, what: str) -> None:
        """Raises RequestError if the output does not continue the prompt, as the named feature needs."""
        if self.encodes:
            raise RequestError(f"the model has an encoder, and no {what}; use /v1/completions", "model")


@dataclass(frozen=True)
class Prepared:
    """A request that is ready for the engine: `n` choices per prompt. Choice `i` continues prompt `i // n`."""

    prompts: list[bytes]  # token ids as little-endian int32 (see `pack_tokens`)
    max_tokens: list[int]  # per prompt
    sampling: SamplingParams
    n: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool = False  # the text of each choice begins with its prompt
    texts: tuple[str, ...] = ()  # the prompts as text, if the answer contains them
    continuous_usage: bool = False  # every chunk has the usage
    include_stop: bool = False  # return the stop string
    skip_special: bool = True  # omit special tokens
    token_ids: bool = False  # return token ids
    timings_per_token: bool = False  # every chunk has the timings
    response_fields: tuple[str, ...] = ()  # wanted parts of the answer; empty: all
    ignored: tuple[str, ...] = ()  # names of unknown fields
    skipped: tuple[str, ...] = ()  # types of tools that are left out
    answer: AnswerForm | None = None  # format of a chat's answer; None: it is text alone
    cache_salt: str | None = None  # see `read_cache_use`
    cache_prompt: bool = True
    echoed: dict[str, Any] = field(default_factory=dict[str, Any])  # fields of the request that the answer repeats

    def prompt_tokens(self, choice: int) -> list[int]:
        """Returns the token ids that choice number `choice` continues."""
        return list(unpack_tokens(self.prompts[choice // self.n]))

    def prompt_length(self, choice: int) -> int:
        """Returns the number of tokens that choice number `choice` continues."""
        return len(self.prompts[choice // self.n]) // TOKEN_BYTES

    def to_map(self) -> dict[str, Any]:
        """Returns a map for msgpack."""
        return asdict(self)

    @classmethod
    def from_map(cls, fields: dict[str, Any]) -> Prepared:
        """Inverse of `to_map`."""
        sampling = SamplingParams(**_with_tuples(fields["sampling"], SamplingParams))
        answer = None if fields["answer"] is None else AnswerForm.from_map(fields["answer"])
        return cls(**{**_with_tuples(fields, cls), "sampling": sampling, "answer": answer})


def _with_tuples(values: dict[str, Any], kind: type) -> dict[str, Any]:
    """Converts lists back to tuples, since msgpack has only lists."""
    tuples = {item.name for item in dataclasses.fields(kind) if str(item.type).startswith("tuple")}
    return {key: tuple(item) if key in tuples and isinstance(item, list) else item for key, item in values.items()}


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Returns token ids as little-endian int32."""
    return array("i", tokens).tobytes()


def unpack_tokens(prompt: bytes) -> Sequence[int]:
    """Inverse of `pack_tokens`, without a copy."""
    return memoryview(prompt).cast("i")

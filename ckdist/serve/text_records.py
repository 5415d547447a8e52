"""Every message between the HTTP process and its text workers: records in the heads of `ckdist.tokens.worker_frames`.

A worker may have been taken over by a hostile tokenizer or template, so `read_answer` checks all types. Rank 0 checks
sampling parameters and prompts.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from msgspec import field
from msgspec.msgpack import Decoder

from ckdist.config.request_defaults import RequestDefaults
from ckdist.engine.messages import TOKEN_BYTES, AdapterScales, check_tokens, unpack_tokens
from ckdist.engine.queue_place import ANY_PLACE, QueuePlace
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.typed_records import Message, Record, decode
from ckdist.errors import EngineError, RequestError
from ckdist.serve.parsers.form import AnswerForm
from ckdist.serve.problems import Problem

MAX_ANSWER = 64 << 20  # bytes of a worker's answer
FIELDS = {  # field with the text of a request -> kinds of requests
    "messages": ("chat", "messages", "count_tokens"), "prompt": ("completion",), "input_prefix": ("infill",),
    "input": ("response", "response_continued", "response_links", "embedding"), "documents": ("rerank",),
    "content": ("llama_embedding", "tokenize"), "text_2": ("score",), "tokens": ("detokenize",),
}  # fmt: skip


class ModelFacts(Record, frozen=True):
    """Facts about the model and the server."""

    name: str
    vocab_size: int  # rows of the embedding; a tokenizer may know fewer tokens
    context_length: int  # maximum of prompt and output tokens together
    strict_fields: bool = False  # refuse unknown fields
    scores: str = ""  # a cross-encoder's function from its output to scores: sigmoid or identity; else ""
    encodes: bool = False  # an encoder reads prompts, and the output does not continue them
    defaults: RequestDefaults = field(default_factory=RequestDefaults)
    adapters: dict[str, int] | None = None  # ids of the adapters by name; None: the server has no places for adapters
    adapters_of_all: AdapterScales = ()  # of requests that name none
    special_in_text: bool = False  # control tokens in texts of messages count as such
    aliases: tuple[str, ...] = ()  # further names of the model
    rank_template: str = ""  # of a decoder that ranks: the question, with {query} and {document}; else ""

    def check_continues(self, what: str) -> None:
        """Raises RequestError if the output does not continue the prompt, as the named feature needs."""
        if self.encodes:
            raise RequestError(f"the model has an encoder, and no {what}; use /v1/completions", "model")


class Task(Record, frozen=True):
    """The task of a text worker, besides the body of the request."""

    kind: str  # of `ckdist.serve.requests.prepare`
    facts: ModelFacts


class Prepared(Message, frozen=True, kw_only=True):
    """A request that is ready for the engine: `n` choices per prompt. Choice `i` continues prompt `i // n`.

    It has no prompts until they are tokenised (see `with_prompts`).
    """

    prompts: list[bytes] = field(default_factory=list[bytes])
    max_tokens: list[int] = field(default_factory=list[int])  # per prompt
    sampling: SamplingParams  # its max_tokens is the limit of all prompts
    n: int = 1
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    echo: bool = False  # the text of each choice begins with its prompt
    texts: tuple[str, ...] = ()  # the prompts as text, if the answer contains them
    continuous_usage: bool = False  # every chunk has the usage
    include_stop: bool = False  # return the stop string
    skip_special: bool = True  # omit special tokens
    token_ids: bool = False  # return token ids
    names_ids: bool = False  # log-probabilities name tokens by id: token_id:7
    timings_per_token: bool = False  # every chunk has the timings
    response_fields: tuple[str, ...] = ()  # wanted parts of the answer; empty: all
    ignored: tuple[str, ...] = ()  # names of unknown fields
    skipped: tuple[str, ...] = ()  # types of tools that are left out
    answer: AnswerForm | None = None  # format of a chat's answer; None: it is text alone
    cache_salt: str | None = None  # see `read_cache_and_place`
    cache_prompt: bool = True
    adapters: AdapterScales = ()
    slot: int = -1  # the slot that --slot-save-path saves it from; -1: any
    place: QueuePlace = ANY_PLACE  # without the client
    items: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])  # of an input that is kept
    echoed: dict[str, Any] = field(default_factory=dict[str, Any])  # fields of the request that the answer repeats

    def __post_init__(self) -> None:
        check_tokens(*self.prompts)

    @property
    def logprobs(self) -> bool:
        """True if the answer has log probabilities."""
        return self.sampling.logprobs is not None

    def prompt_tokens(self, choice: int) -> list[int]:
        """Returns the token ids that choice number `choice` continues."""
        return list(unpack_tokens(self.prompts[choice // self.n]))

    def prompt_length(self, choice: int) -> int:
        """Returns the number of tokens that choice number `choice` continues."""
        return len(self.prompts[choice // self.n]) // TOKEN_BYTES


class EmbeddingWork(Message, frozen=True):
    """A request for vectors, or for scores of texts."""

    prompts: list[bytes]  # for a cross-encoder each is a pair of texts
    base64: bool = False
    dimensions: int = 0  # keep this number of elements of each vector; 0: all
    normalise: bool = True
    queries: int = 0  # this number of prompts at the start is compared with the others
    best: int = 0  # maximum number of documents in the answer
    texts: tuple[str, ...] = ()  # the documents, if the answer contains them
    first_texts: tuple[int, ...] = ()  # for a cross-encoder: tokens of the first text of each pair
    sigmoid: bool = False  # for a cross-encoder: the score is the sigmoid of the output
    plain: bool = False  # the answer is only a list of scores
    cache_salt: str | None = None
    cache_prompt: bool = True
    place: QueuePlace = ANY_PLACE  # without the client
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_tokens(*self.prompts)


class Refusal(Message, frozen=True):
    """The request is refused: the fields of a `Problem`."""

    status: int
    message: str
    field: str | None = None
    code: str | None = None
    details: dict[str, int] | None = None
    retry_after: int | None = None


class WorkerFault(Message, frozen=True):
    """A bug in the worker."""

    message: str


class JsonAnswer(Message, frozen=True):
    """The body of the worker's frame is the answer, as JSON."""


Answer: TypeAlias = Prepared | EmbeddingWork | Refusal | WorkerFault | JsonAnswer
_ANSWERS = Decoder[Answer](Answer)


def read_answer(head: bytes) -> Answer:
    """Decodes the head of a worker's frame. Raises EngineError for a head that no worker of ours sends."""
    try:
        return decode(_ANSWERS, head)
    except RequestError as error:
        raise EngineError(f"a text worker has sent no answer: {error}") from None


def too_much(kind: str) -> Problem:
    """Returns the answer if a worker exceeded its limits."""
    field = next((name for name, kinds in FIELDS.items() if kind in kinds), None)
    what = f"rendering and tokenising {field or 'the text'} takes too much time or memory"
    return Problem(400, f"{what}; send less text, or a simpler grammar or schema", field)

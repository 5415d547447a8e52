"""The request fields that chat and text completions share, as SamplingParams and what the HTTP process itself acts on."""

import dataclasses
import hashlib
from dataclasses import dataclass

from ckdist.engine.sampling import SamplingParams
from ckdist.engine.text import check_stop
from ckdist.errors import RequestError
from ckdist.serve.requests.json_body import kind_of
from ckdist.serve.requests.fields import Fields, in_range

MAX_CHOICES = 16
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_TOP_K = (1 << 31) - 1

KNOWN = frozenset(
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias seed stop stop_token_ids "
    "ignore_eos max_tokens n stream stream_options response_format best_of".split()
)
# Fields of OpenAI's API and of its clients that change nothing here.
ACCEPTED = frozenset(
    "model user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "reasoning_effort verbosity parallel_tool_calls cache_prompt".split()
)


@dataclass(frozen=True)
class Asked:
    """What both kinds of request ask for. `max_tokens` of `sampling` is 0 until the prompt's length is known."""

    sampling: SamplingParams
    max_tokens: int | None
    stops: tuple[str, ...]
    n: int
    stream: bool
    include_usage: bool


def read_asked(fields: Fields, max_tokens: int | None, vocab_size: int) -> Asked:
    """The shared fields; `max_tokens` was read by the caller, under its own names."""
    for name in ACCEPTED - {"metadata", "store", "parallel_tool_calls", "cache_prompt"}:
        fields.text(name)
    _refuse_other_formats(fields)
    n = fields.integer("n", 1, 1, MAX_CHOICES)
    best_of = fields.integer("best_of", None, 1, MAX_CHOICES)
    if best_of is not None and best_of != n:
        raise RequestError(f"best_of ({best_of}) is not supported; leave it out, or make it equal to n ({n})", "best_of")
    top_k = fields.integer("top_k", 0, -1, MAX_TOP_K)
    sampling = SamplingParams(
        max_tokens=0,
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_k=max(top_k, 0),
        top_p=fields.number("top_p", 1.0, 0, 1),
        min_p=fields.number("min_p", 0.0, 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        logit_bias=_logit_bias(fields, vocab_size),
        seed=fields.integer("seed", None, -(1 << 63), (1 << 63) - 1),
        stop_token_ids=fields.token_ids("stop_token_ids", vocab_size, MAX_STOP_TOKENS),
        ignore_eos=fields.switch("ignore_eos"),
    )
    stream = fields.switch("stream")
    return Asked(sampling, max_tokens, _stops(fields), n, stream, _include_usage(fields, stream))


def for_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """`sampling` with the seed of choice number `choice`: the first has the request's own, the others ones derived from it."""
    if sampling.seed is None:
        return sampling
    seed = sampling.seed & ((1 << 63) - 1)
    if choice:
        digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
    return dataclasses.replace(sampling, seed=seed)


def with_logprobs(sampling: SamplingParams, logprobs: int | None, of_prompt: bool) -> SamplingParams:
    """`sampling` that asks for `logprobs` alternatives of each new token, and of the prompt's too where `of_prompt`."""
    return dataclasses.replace(sampling, logprobs=logprobs, prompt_logprobs=logprobs if of_prompt else None)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop", str, list)
    given = [value] if isinstance(value, str) else value or []
    return check_stop([stop for stop in given if stop != ""])


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    given = fields.value("logit_bias", dict) or {}
    if len(given) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(given)} tokens; at most {MAX_BIASES} are allowed", "logit_bias")
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise RequestError(f"logit_bias has a key ({key[:20]!r}) that is not a token from 0 to {vocab_size - 1}", "logit_bias")
        if type(bias) not in (int, float):
            raise RequestError(f"logit_bias must map tokens to numbers, not to {kind_of(bias)}", "logit_bias")
        biases[int(key)] = float(in_range(bias, "logit_bias", -100, 100))
    return biases


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.value("stream_options", dict)
    if options is None:
        return False
    if not stream:
        raise RequestError("stream_options needs stream to be true", "stream_options")
    return Fields(options).switch("include_usage")


def _refuse_other_formats(fields: Fields) -> None:
    form = fields.value("response_format", dict)
    if form is not None and Fields(form).text("type", "") != "text":
        raise RequestError("response_format of a type other than 'text' is not supported yet", "response_format")

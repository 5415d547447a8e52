"""Parameters that all requests for text share: sampling, length and output."""

import dataclasses
from typing import Any

from msgspec import structs

from ckdist.engine.messages import pack_tokens
from ckdist.engine.text import check_stop
from ckdist.serve.requests.engine_fields import read_cache_and_place, read_drafts
from ckdist.serve.requests.prompt import fit_output
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.serve.requests.sampling_fields import read_sampling
from ckdist.serve.requests.structure import read_structure
from ckdist.serve.text_records import ModelFacts, Prepared
from ckdist.tokens.tokenizer import Tokenizer

MAX_CHOICES = 16
MAX_LENGTH = 1 << 31
MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens", "n_predict", "num_predict", "max_new_tokens")
MAX_SLOT = 1 << 20
UNLIMITED = (-1, -2)  # in llama.cpp and Ollama: until the context is full


def with_prompts(work: Prepared, prompts: list[list[int]], facts: ModelFacts, field: str) -> Prepared:
    """Adds the token ids of the prompts, which are the request's `field`.

    Raises RequestError for a prompt that does not fit.
    """
    rooms = [fit_output(tokens, work.sampling.max_tokens, facts.context_length, field) for tokens in prompts]
    return structs.replace(work, prompts=[pack_tokens(tokens) for tokens in prompts], max_tokens=rooms)


def read_params(
    fields: Fields,
    tokenizer: Tokenizer,
    facts: ModelFacts,
    logprobs: int | None,
    least_tokens: int = 0,
    default_tokens: int | None = None,
    sampling_defaults: dict[str, Any] | None = None,
) -> Prepared:
    """Reads the shared parameters. Raises RequestError for invalid values."""
    defaults = facts.defaults
    sampling = read_sampling(fields, tokenizer, facts.vocab_size, (sampling_defaults or {}) | defaults.sampling)
    grammar = read_structure(fields)
    max_tokens = _max_tokens(fields, least_tokens, defaults.max_tokens or default_tokens)
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        told = f"({sampling.min_tokens}) is more than the {max_tokens} tokens that the answer may have"
        raise wrong("min_tokens", told)
    stream = fields.switch("stream")
    options = fields.inner("stream_options")
    limit = facts.context_length if max_tokens is None else max_tokens
    return Prepared(
        sampling=dataclasses.replace(
            sampling, max_tokens=limit, grammar=grammar, logprobs=logprobs, **read_drafts(fields)
        ),
        stops=_stops(fields),
        n=_choices(fields),
        stream=stream,
        include_usage=options.switch("include_usage") and stream,
        continuous_usage=options.switch("continuous_usage_stats") and stream,
        include_stop=fields.switch("include_stop_str_in_output"),
        skip_special=fields.switch("skip_special_tokens", True),
        token_ids=fields.switch(("return_token_ids", "return_tokens")),
        names_ids=fields.switch("return_tokens_as_token_ids"),
        timings_per_token=fields.switch("timings_per_token"),
        slot=fields.integer(("id_slot", "slot_id"), -1, -1, MAX_SLOT),
        **read_cache_and_place(fields),
    )


def _max_tokens(fields: Fields, least: int, default: int | None) -> int | None:
    """Returns the first real limit. A client may send its default -1 under one name, and its user's under another."""
    named = {name: fields.integer(name, None, -MAX_LENGTH, MAX_LENGTH) for name in MAX_TOKENS_NAMES}
    given = {name: value for name, value in named.items() if value is not None}
    limits = {name: value for name, value in given.items() if value not in UNLIMITED}
    if not limits:
        return None if given else default
    name, value = next(iter(limits.items()))
    if value < least:
        raise wrong(name, f"({value}) must be from {least} to {MAX_LENGTH}, or -1 for as many as fit")
    return value


def _choices(fields: Fields) -> int:
    n = fields.integer(("n", "n_cmpl"), 1, 1, MAX_CHOICES)
    best_of = fields.integer("best_of", None, 0, MAX_CHOICES)
    if best_of not in (None, 0, 1, n):
        text = f"({best_of}) is not supported; leave it out, or make it equal to n ({n})"
        raise wrong("best_of", text, "unsupported_value")
    return n


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.value("stop", str, list)
    given = [value] if isinstance(value, str) else value or []
    return check_stop([stop for stop in given if stop != ""])

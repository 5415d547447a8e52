"""Reads and checks a body of llama-server's /completion, with llama-server's sampling defaults."""

from dataclasses import dataclass, replace
from typing import Any

from ckdist.config.samplers import SAMPLERS
from ckdist.engine.sampling_params import MAX_LOGPROBS
from ckdist.errors import RequestError
from ckdist.serve.requests.completion_request import Prompt, read_prompts
from ckdist.serve.requests.params import RequestParams, read_params
from ckdist.serve.requests.prepared import ModelFacts
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.requests.sampling_fields import LLAMA_RANDOM_SEED
from ckdist.tokens.tokenizer import Tokenizer

SAMPLING_DEFAULTS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repeat_last_n": 64,
    "samplers": SAMPLERS,
}
MAX_RESPONSE_FIELDS = 64
MAX_PATH_CHARS = 200


@dataclass(frozen=True)
class LlamaCompletionRequest:
    """The contents of a body."""

    params: RequestParams
    prompts: tuple[Prompt, ...]
    # Paths of the wanted parts of the answer, as `generation_settings/seed`; empty: all.
    response_fields: tuple[str, ...]


def parse_llama_completion(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> LlamaCompletionRequest:
    """Reads the body. Raises RequestError for invalid and unsupported values."""
    fields = Fields(body)
    prompts, response_fields = read_prompts(fields, facts.vocab_size), _response_fields(fields)
    logprobs = fields.integer(("n_probs", "logprobs"), 0, 0, MAX_LOGPROBS) or None
    params = read_params(fields, tokenizer, facts, logprobs, sampling_defaults=SAMPLING_DEFAULTS)
    if params.sampling.seed == LLAMA_RANDOM_SEED:
        params = replace(params, sampling=replace(params.sampling, seed=None))
    return LlamaCompletionRequest(params, prompts, response_fields)


def _response_fields(fields: Fields) -> tuple[str, ...]:
    given = fields.value("response_fields", list) or []
    if len(given) > MAX_RESPONSE_FIELDS or not all(isinstance(x, str) and len(x) <= MAX_PATH_CHARS for x in given):
        message = f"response_fields must be a list of at most {MAX_RESPONSE_FIELDS} paths"
        raise RequestError(message, "response_fields", "invalid_value")
    return tuple(given)

"""Reads the parameters of llama-server's /completion, with llama-server's sampling defaults."""

from dataclasses import replace

from ckdist.config.samplers import SAMPLERS
from ckdist.engine.sampling_params import MAX_LOGPROBS
from ckdist.errors import RequestError
from ckdist.serve.records import ModelFacts, Prepared
from ckdist.serve.requests.params import read_params
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


def read_llama_params(fields: Fields, tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Reads what all requests for text share. Raises RequestError for invalid and unsupported values."""
    logprobs = fields.integer(("n_probs", "logprobs"), 0, 0, MAX_LOGPROBS) or None
    work = read_params(fields, tokenizer, facts, logprobs, sampling_defaults=SAMPLING_DEFAULTS)
    if work.sampling.seed == LLAMA_RANDOM_SEED:
        return replace(work, sampling=replace(work.sampling, seed=None))
    return work


def read_response_fields(fields: Fields) -> tuple[str, ...]:
    """Returns the paths of the wanted parts of the answer, as `generation_settings/seed`; none if all are wanted."""
    given = fields.value("response_fields", list) or []
    if len(given) > MAX_RESPONSE_FIELDS or not all(isinstance(x, str) and len(x) <= MAX_PATH_CHARS for x in given):
        message = f"response_fields must be a list of at most {MAX_RESPONSE_FIELDS} paths"
        raise RequestError(message, "response_fields", "invalid_value")
    return tuple(given)

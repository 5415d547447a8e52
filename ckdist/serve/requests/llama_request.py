"""Prepares bodies of llama-server's /completion and /infill, with llama-server's sampling defaults."""

from dataclasses import replace
from typing import Any

from msgspec import structs

from ckdist.engine.sampling_params import MAX_LOGPROBS
from ckdist.serve.requests.completion_request import given_prompts, prompt_texts
from ckdist.serve.requests.infill import infill_tokens, read_gap
from ckdist.serve.requests.params import read_params, with_prompts
from ckdist.serve.requests.prompt import encode_prompt
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.serve.requests.sampling_fields import LLAMA_DEFAULTS, LLAMA_RANDOM_SEED
from ckdist.serve.text_records import ModelFacts, Prepared
from ckdist.tokens.tokenizer import Tokenizer

MAX_RESPONSE_FIELDS = 64
MAX_PATH_CHARS = 200


def llama_completion(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of llama-server's /completion for the engine."""
    fields = Fields(body)
    given, wanted = given_prompts(fields, facts), _response_fields(fields)
    logprobs = fields.integer(("n_probs", "logprobs"), 0, 0, MAX_LOGPROBS) or None
    work = read_params(fields, tokenizer, facts, logprobs, sampling_defaults=LLAMA_DEFAULTS)
    if work.sampling.seed == LLAMA_RANDOM_SEED:
        work = structs.replace(work, sampling=replace(work.sampling, seed=None))
    prompts = [encode_prompt(prompt, tokenizer, True, facts, "prompt") for prompt in given]
    texts = prompt_texts(given, prompts, tokenizer)
    token_ids = work.token_ids or work.stream  # streamed pieces always have them
    work = structs.replace(work, texts=texts, response_fields=wanted, token_ids=token_ids)
    return with_prompts(work, prompts, facts, "prompt")


def infill(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of llama-server's /infill for the engine."""
    facts.check_continues("infill")
    gap, others = read_gap(body)
    return llama_completion({**others, "prompt": infill_tokens(gap, tokenizer, facts)}, tokenizer, facts)


def _response_fields(fields: Fields) -> tuple[str, ...]:
    # Paths of the wanted parts of the answer, as `generation_settings/seed`; none: all.
    given = fields.value("response_fields", list) or []
    if len(given) > MAX_RESPONSE_FIELDS or not all(isinstance(x, str) and len(x) <= MAX_PATH_CHARS for x in given):
        raise wrong("response_fields", f"must be a list of at most {MAX_RESPONSE_FIELDS} paths")
    return tuple(given)

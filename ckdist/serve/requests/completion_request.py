"""Prepares a body of /v1/completions, whose prompts are texts or token ids."""

from dataclasses import replace
from typing import Any

from msgspec import structs

from ckdist.engine.sampling_params import MAX_LOGPROBS
from ckdist.serve.requests.infill import Gap, infill_tokens
from ckdist.serve.requests.params import read_params, with_prompts
from ckdist.serve.requests.prompt import Prompt, encode_prompt, read_prompts
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.serve.text_records import ModelFacts, Prepared
from ckdist.tokens.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as OpenAI's
MAX_PROMPTS = 1024


def completion(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of /v1/completions for the engine."""
    fields = Fields(body)
    given = given_prompts(fields, facts)
    echo, add_special = fields.switch("echo"), fields.switch("add_special_tokens", True)
    work = read_params(fields, tokenizer, facts, _logprobs(fields), default_tokens=DEFAULT_MAX_TOKENS)
    suffix = fields.text("suffix")
    if suffix and (echo or not all(isinstance(prompt, str) for prompt in given)):
        raise wrong("suffix", "needs prompts that are text, and no echo")
    if suffix:
        facts.check_continues("infill")
        gaps = [Gap(_text(prompt, [], tokenizer), suffix, "", ()) for prompt in given]
        prompts = [infill_tokens(gap, tokenizer, facts, "suffix") for gap in gaps]
    else:
        prompts = [encode_prompt(prompt, tokenizer, add_special, facts, "prompt") for prompt in given]
    if echo:
        sampling = replace(work.sampling, prompt_logprobs=work.sampling.logprobs)
        work = structs.replace(work, sampling=sampling, echo=True, texts=prompt_texts(given, prompts, tokenizer))
    return with_prompts(work, prompts, facts, "prompt")


def given_prompts(fields: Fields, facts: ModelFacts) -> tuple[Prompt, ...]:
    """Reads `prompt`. Raises RequestError if there are too many."""
    given = fields.value("prompt", str, list)
    if isinstance(given, list) and len(given) > MAX_PROMPTS and not any(type(part) is int for part in given):
        raise wrong("prompt", f"has {len(given)} prompts; at most {MAX_PROMPTS} are read at once")
    return read_prompts(fields, ("prompt",), facts)


def prompt_texts(prompts: tuple[Prompt, ...], tokens: list[list[int]], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns all prompts as texts."""
    return tuple(_text(prompt, ids, tokenizer) for prompt, ids in zip(prompts, tokens, strict=True))


def _text(prompt: Prompt, tokens: list[int], tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(tokens)


def _logprobs(fields: Fields) -> int | None:
    """Alternatives per token; None without log-probabilities.

    The field is a number as in OpenAI's API, or a boolean together with `top_logprobs` or llama-server's `n_probs`.
    """
    wanted = fields.value("logprobs", bool, int, float)
    other = max(fields.integer(name, 0, 0, MAX_LOGPROBS) for name in ("top_logprobs", "n_probs"))
    if type(wanted) is bool:
        return other if wanted else None
    return fields.integer("logprobs", other or None, 0, MAX_LOGPROBS)

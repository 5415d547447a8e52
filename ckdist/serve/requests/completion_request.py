"""Prepares a body of /v1/completions, whose prompts are texts or token ids."""

from dataclasses import replace
from typing import Any

from msgspec import structs

from ckdist.engine.sampling_params import MAX_LOGPROBS
from ckdist.errors import RequestError
from ckdist.serve.requests.infill import Gap, infill_tokens
from ckdist.serve.requests.params import read_params, with_prompts
from ckdist.serve.requests.prompt import tokenise
from ckdist.serve.requests.request_fields import Fields, check_token_ids
from ckdist.serve.text_records import ModelFacts, Prepared
from ckdist.tokens.chat_input import kind_of
from ckdist.tokens.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as OpenAI's
MAX_PROMPTS = 1024

Prompt = str | tuple[int | str, ...]  # llama-server allows texts between token ids


def completion(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    """Prepares a body of /v1/completions for the engine."""
    fields = Fields(body)
    given = read_prompts(fields, facts.vocab_size)
    echo, add_special = fields.switch("echo"), fields.switch("add_special_tokens", True)
    work = read_params(fields, tokenizer, facts, _logprobs(fields), default_tokens=DEFAULT_MAX_TOKENS)
    suffix = fields.text("suffix")
    if suffix and (echo or not all(isinstance(prompt, str) for prompt in given)):
        raise RequestError("suffix needs prompts that are text, and no echo", "suffix", "invalid_value")
    if suffix:
        facts.check_continues("infill")
        gaps = [Gap(_text(prompt, [], tokenizer), suffix, "", ()) for prompt in given]
        prompts = [infill_tokens(gap, tokenizer, facts, "suffix") for gap in gaps]
    else:
        prompts = [encode_prompt(prompt, tokenizer, add_special, facts) for prompt in given]
    if echo:
        sampling = replace(work.sampling, prompt_logprobs=work.sampling.logprobs)
        work = structs.replace(work, sampling=sampling, echo=True, texts=prompt_texts(given, prompts, tokenizer))
    return with_prompts(work, prompts, facts, "prompt")


def read_prompts(fields: Fields, vocab_size: int) -> tuple[Prompt, ...]:
    """Reads `prompt`: a text, a list of token ids (maybe with texts in between), or a list of such prompts."""
    given = fields.value("prompt", str, list)
    if isinstance(given, str):
        return (given,)
    if not given:
        message = "prompt is needed: a string, a list of strings, token ids, or a list of token id lists"
        raise RequestError(message, "prompt", "missing_required_parameter")
    if any(type(part) is int for part in given):
        return (_token_prompt(given, "prompt", vocab_size),)
    if len(given) > MAX_PROMPTS:
        message = f"prompt has {len(given)} prompts; at most {MAX_PROMPTS} are read at once"
        raise RequestError(message, "prompt", "invalid_value")
    return tuple(_prompt(prompt, f"prompt[{index}]", vocab_size) for index, prompt in enumerate(given))


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, add_special: bool, facts: ModelFacts) -> list[int]:
    """Returns the token ids of one prompt. In a mixed prompt only a text at the start gets BOS."""
    if isinstance(prompt, str):
        return tokenise(tokenizer, prompt, add_special, facts, "prompt")
    tokens: list[int] = []
    for index, part in enumerate(prompt):
        is_first = add_special and index == 0
        tokens += tokenise(tokenizer, part, is_first, facts, "prompt") if isinstance(part, str) else [part]
    return tokens


def prompt_texts(prompts: tuple[Prompt, ...], tokens: list[list[int]], tokenizer: Tokenizer) -> tuple[str, ...]:
    """Returns all prompts as texts."""
    return tuple(_text(prompt, ids, tokenizer) for prompt, ids in zip(prompts, tokens, strict=True))


def _text(prompt: Prompt, tokens: list[int], tokenizer: Tokenizer) -> str:
    return prompt if isinstance(prompt, str) else tokenizer.decode(tokens)


def _prompt(prompt: Any, name: str, vocab_size: int) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return _token_prompt(prompt, name, vocab_size)
    message = f"{name} must be a string or a list of token ids, not {kind_of(prompt)}"
    raise RequestError(message, "prompt", "invalid_type")


def _token_prompt(prompt: list[Any], name: str, vocab_size: int) -> Prompt:
    check_token_ids([part for part in prompt if not isinstance(part, str)], name, vocab_size)
    return tuple(prompt)


def _logprobs(fields: Fields) -> int | None:
    """Alternatives per token; None without log-probabilities.

    The field is a number as in OpenAI's API, or a boolean together with `top_logprobs` or llama-server's `n_probs`.
    """
    wanted = fields.value("logprobs", bool, int, float)
    other = max(fields.integer(name, 0, 0, MAX_LOGPROBS) for name in ("top_logprobs", "n_probs"))
    if type(wanted) is bool:
        return other if wanted else None
    return fields.integer("logprobs", other or None, 0, MAX_LOGPROBS)

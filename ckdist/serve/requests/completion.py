"""What a body of /v1/completions asks for: prompts as text or token ids, echo and scores. It reads and checks."""

from dataclasses import dataclass
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.json_body import kind_of
from ckdist.serve.requests.fields import Fields, check_token_ids
from ckdist.serve.requests.sampling import ACCEPTED, KNOWN, MAX_LOGPROBS, Asked, read_asked

DEFAULT_MAX_TOKENS = 16  # as OpenAI's
MAX_PROMPTS = 1024
OWN = frozenset("prompt echo logprobs suffix".split())
UNSUPPORTED = {"grammar": "", "json_schema": "", "tools": "", "messages": "; use /v1/chat/completions"}

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class CompletionRequest:
    """`logprobs` is the number of alternatives per token, None without logprobs."""

    asked: Asked
    prompts: tuple[Prompt, ...]
    echo: bool
    logprobs: int | None


def parse_completion(body: dict[str, Any], vocab_size: int) -> CompletionRequest:
    """RequestError for anything that cannot be meant or is not supported."""
    fields = Fields(body)
    fields.refuse_unknown(KNOWN | ACCEPTED | OWN, UNSUPPORTED)
    if fields.text("suffix"):
        raise RequestError("suffix is not supported", "suffix")
    return CompletionRequest(
        asked=read_asked(fields, fields.integer("max_tokens", DEFAULT_MAX_TOKENS, 0, 1 << 31), vocab_size),
        prompts=_prompts(fields, vocab_size),
        echo=fields.switch("echo"),
        logprobs=fields.integer("logprobs", None, 0, MAX_LOGPROBS),
    )


def _prompts(fields: Fields, vocab_size: int) -> tuple[Prompt, ...]:
    given = fields.value("prompt", str, list)
    if isinstance(given, str):
        return (given,)
    if not given:
        raise RequestError("prompt is needed: a string, a list of strings, token ids, or a list of token id lists", "prompt")
    if type(given[0]) is int:
        return (check_token_ids(given, "prompt", vocab_size),)
    if len(given) > MAX_PROMPTS:
        raise RequestError(f"prompt has {len(given)} prompts; at most {MAX_PROMPTS} are read at once", "prompt")
    return tuple(_prompt(prompt, f"prompt[{index}]", vocab_size) for index, prompt in enumerate(given))


def _prompt(prompt: Any, name: str, vocab_size: int) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return check_token_ids(prompt, name, vocab_size)
    raise RequestError(f"{name} must be a string or a list of token ids, not {kind_of(prompt)}", "prompt")

"""One entry for every kind of request: bytes of a body in, a `Prepared` for the engine or a finished JSON answer out."""

from typing import Any

from ckdist.serve.requests.chat import parse_chat
from ckdist.serve.requests.completion import parse_completion
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.requests.prepared import ModelFacts, Prepared
from ckdist.serve.requests.prompt import fit_output, render_chat
from ckdist.serve.requests.sampling import with_logprobs
from ckdist.serve.requests.tokens import detokenize, tokenize
from ckdist.tokens.tokenizer import Tokenizer


def prepare(kind: str, body: bytes, tokenizer: Tokenizer, facts: ModelFacts) -> Prepared | dict[str, Any]:
    """What the request of this kind (a key of `KINDS`) comes to. RequestError or Problem for what cannot be meant."""
    return KINDS[kind](parse_object(body), tokenizer, facts)


def chat(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    asked_for = parse_chat(body, facts.vocab_size)
    asked = asked_for.asked
    text = render_chat(tokenizer, asked_for.messages, asked_for.add_generation_prompt, asked_for.template_kwargs)
    tokens = tokenizer.encode(text, add_special=False)
    room = fit_output(tokens, asked.max_tokens, facts.context_length, "messages")
    sampling = with_logprobs(asked.sampling, asked_for.logprobs, of_prompt=False)
    wants_logprobs = asked_for.logprobs is not None
    return Prepared([tokens], [room], sampling, asked.n, asked.stops, asked.stream, asked.include_usage, wants_logprobs)


def completion(body: dict[str, Any], tokenizer: Tokenizer, facts: ModelFacts) -> Prepared:
    asked_for = parse_completion(body, facts.vocab_size)
    asked = asked_for.asked
    prompts, echo = [], []
    for given in asked_for.prompts:
        is_text = isinstance(given, str)
        prompts.append(tokenizer.encode(given, add_special=True) if is_text else list(given))
        if asked_for.echo:
            echo.append(given if is_text else tokenizer.decode(given))
    rooms = [fit_output(tokens, asked.max_tokens, facts.context_length, "prompt") for tokens in prompts]
    sampling = with_logprobs(asked.sampling, asked_for.logprobs, of_prompt=asked_for.echo)
    return Prepared(
        prompts,
        rooms,
        sampling,
        asked.n,
        asked.stops,
        asked.stream,
        asked.include_usage,
        asked_for.logprobs is not None,
        echo if asked_for.echo else None,
    )


KINDS = {"chat": chat, "completion": completion, "tokenize": tokenize, "detokenize": detokenize}

"""Converts the prompts of a request (texts, token ids, messages) to token ids that fit the context."""

from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.request_fields import Fields, check_token_ids, wrong
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.chat_input import kind_of
from ckdist.tokens.control_text import RenderedChat
from ckdist.tokens.tokenizer import Tokenizer

Prompt = str | tuple[int | str, ...]  # llama-server allows texts between token ids


def read_prompts(
    fields: Fields, names: tuple[str, ...], facts: ModelFacts, *more: type[dict[Any, Any]]
) -> tuple[Prompt, ...]:
    """Reads a text, a list of token ids (maybe with texts in between), or a list of such prompts.

    With dict as a further type, llama-server's object with `prompt_string` may replace a text.
    """
    name, given = names[0], fields.value(names, str, list, *more)
    if not given and not isinstance(given, (str, dict)):
        text = "is needed: a string, a list of strings, token ids, or a list of token id lists"
        raise wrong(name, text, "missing_required_parameter")
    if not isinstance(given, list) or any(type(part) is int for part in given):
        return (_prompt(given, name, facts, more),)
    return tuple(_prompt(prompt, f"{name}[{index}]", facts, more) for index, prompt in enumerate(given))


def _prompt(prompt: Any, name: str, facts: ModelFacts, more: tuple[type, ...]) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        check_token_ids([part for part in prompt if not isinstance(part, str)], name, facts.vocab_size)
        return tuple(prompt)
    text = prompt.get("prompt_string") if more and isinstance(prompt, dict) else None
    if isinstance(text, str) and not prompt.get("multimodal_data"):
        return text
    message = f"{name} must be a string or a list of token ids, not {kind_of(prompt)}"
    raise RequestError(message, name.partition("[")[0], "invalid_type")


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, add_special: bool, facts: ModelFacts, field: str) -> list[int]:
    """Returns the token ids of one prompt. In a mixed prompt only a text at the start gets BOS."""
    if isinstance(prompt, str):
        return tokenise(tokenizer, prompt, add_special, facts, field)
    tokens: list[int] = []
    for index, part in enumerate(prompt):
        is_first = add_special and index == 0
        tokens += tokenise(tokenizer, part, is_first, facts, field) if isinstance(part, str) else [part]
    return tokens


def tokenise(tokenizer: Tokenizer, text: str, add_special: bool, facts: ModelFacts, field: str) -> list[int]:
    """Returns the ids of `text`. Raises RequestError like `check_length`."""
    return tokenise_chat(tokenizer, RenderedChat(text), add_special, facts, field)


def tokenise_chat(
    tokenizer: Tokenizer, chat: RenderedChat, add_special: bool, facts: ModelFacts, field: str = "messages"
) -> list[int]:
    """Returns the ids of a chat. Raises RequestError like `check_length`."""
    check_length(tokenizer, chat.text, facts, field)
    return tokenizer.encode(chat.text, add_special=add_special, literal=chat.literal)


def check_length(tokenizer: Tokenizer, text: str, facts: ModelFacts, field: str) -> None:
    """Raises RequestError if `text` has more bytes than any text that fits the context.

    It needs no tokenization.
    """
    most = tokenizer.most_bytes_per_token
    if most is not None and len(text) > facts.context_length:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > most * facts.context_length:
            raise too_long(-(-size // most), facts.context_length, facts.context_length, field, "at least ")


def fit_output(prompt: list[int], max_tokens: int, context_length: int, field: str) -> int:
    """Returns how many tokens may follow `prompt`: min(max_tokens, context_length - len(prompt)).

    Raises RequestError if the prompt is empty or leaves no room.
    """
    if not prompt:
        raise RequestError(f"{field} is empty; give at least one token", field)
    most = context_length - (max_tokens != 0)
    if len(prompt) > most:
        raise too_long(len(prompt), most, context_length, field)
    return min(max_tokens, context_length - len(prompt))


def fitting(tokens: list[int], facts: ModelFacts, field: str) -> list[int]:
    """Returns `tokens`. Raises RequestError if they exceed the context."""
    if len(tokens) > facts.context_length:
        raise too_long(len(tokens), facts.context_length, facts.context_length, field)
    return tokens


def too_long(tokens: int, most: int, context_length: int, field: str, about: str = "") -> RequestError:
    """Returns the error for a prompt with more than `most` tokens. `about` precedes a number that is not exact.

    Clients recognize it by its code; LangChain and LiteLLM by the words "context length" and "exceeds the available
    context size".
    """
    return RequestError(
        f"the prompt has {about}{tokens} tokens, which exceeds the available context size: this model's maximum "
        f"context length is {context_length} tokens, and a prompt may fill {most} of them; shorten it, or "
        "raise --ctx-size",
        field,
        "context_length_exceeded",
        {"n_prompt_tokens": tokens, "n_ctx": context_length},
    )

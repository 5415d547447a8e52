"""Converts the prompt of a request (text, messages) to token ids that fit the context."""

from ckdist.errors import RequestError
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.control_text import RenderedChat
from ckdist.tokens.tokenizer import Tokenizer


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

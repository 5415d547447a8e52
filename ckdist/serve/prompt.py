"""From what a request gives (text, messages, token ids) to token ids that fit the context, off the event loop where it takes long."""

import asyncio
from typing import Any

from ckdist.errors import RequestError

INLINE_CHARACTERS = 2048  # shorter texts are tokenised faster than a thread is woken


async def encode(tokenizer, text: str, add_special: bool) -> list[int]:
    """Token ids of `text`."""
    if len(text) <= INLINE_CHARACTERS:
        return tokenizer.encode(text, add_special=add_special)
    return await asyncio.to_thread(tokenizer.encode, text, add_special=add_special)


async def render_chat(tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any]) -> list[int]:
    """Token ids of a chat; the template writes BOS and the like itself. RequestError when the model has no template or it refuses."""
    template = tokenizer.chat_template
    if template is None:
        raise RequestError("the model has no chat template; use /v1/completions", "messages")
    if sum(len(message["content"]) for message in messages) <= INLINE_CHARACTERS:
        text = template.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)
    else:
        text = await asyncio.to_thread(template.render, messages, add_generation_prompt=add_generation_prompt, **kwargs)
    return await encode(tokenizer, text, add_special=False)


def fit_output(prompt: list[int], max_tokens: int | None, context_length: int, field: str) -> int:
    """How many tokens may follow `prompt`: `max_tokens`, cut to what the context leaves; all that it leaves for None.

    RequestError when the prompt is empty or leaves no room.
    """
    if not prompt:
        raise RequestError(f"{field} is empty; give at least one token", field)
    most = context_length - (max_tokens != 0)
    if len(prompt) > most:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and the context {context_length}, of which it may fill {most}; shorten it, or raise --ctx-size", field
        )
    room = context_length - len(prompt)
    return room if max_tokens is None else min(max_tokens, room)

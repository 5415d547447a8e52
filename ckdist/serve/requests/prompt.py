"""From what a request gives (text, messages, token ids) to token ids that fit the context."""

from typing import Any

from ckdist.errors import RequestError


def render_chat(tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any]) -> str:
    """A chat as text. RequestError when the model has no template or it refuses."""
    template = tokenizer.chat_template
    if template is None:
        raise RequestError("the model has no chat template; use /v1/completions", "messages")
    return template.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)


def fit_output(prompt: list[int], max_tokens: int | None, context_length: int, field: str) -> int:
    """How many tokens may follow `prompt`: `max_tokens`, cut to what the context leaves; all that it leaves for None.

    RequestError when the prompt is empty or leaves no room.
    """
    if not prompt:
        raise RequestError(f"{field} is empty; give at least one token", field)
    most = context_length - (max_tokens != 0)
    if len(prompt) > most:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and the context {context_length}, of which it may fill {most}; "
            "shorten it, or raise --ctx-size",
            field,
        )
    room = context_length - len(prompt)
    return room if max_tokens is None else min(max_tokens, room)

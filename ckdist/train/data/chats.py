"""Renders chats with their template, and marks the characters on which the loss is taken.

A model's template is a program of strangers. A process with limits runs it, on many chats per call.
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ckdist.errors import RequestError
from ckdist.tokens.text_process import TOO_MUCH, TextProcess
from ckdist.tokens.tokenizer import Tokenizer

HANDLER = "ckdist.train.data.chats:run"
BATCH_CHATS, BATCH_BYTES = 64, 1 << 20  # limits of one message to the process

Messages: TypeAlias = list[Any]
Written: TypeAlias = tuple[str, list[tuple[int, int]]]  # the text, and spans of the assistant's characters
Chat: TypeAlias = tuple[Messages, Sequence[dict[str, Any]]]  # messages, and the tools that they may call
WriteChats: TypeAlias = Callable[[Sequence[Chat]], list[Written | RequestError]]


def write_chat(messages: Messages, tools: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> Written:
    """Renders a chat as in serving.

    Returns:
        The text, and the spans of characters that the assistant wrote.

    Raises:
        RequestError: The spans cannot be determined.
    """
    assert tokenizer.chat_template is not None, "a tokenizer that renders chats has a template"
    template, options = tokenizer.chat_template, {"tools": tools, "continue_final_message": False}
    render = functools.partial(template.render, **options)
    text, literal = template.prompt(tokenizer.control_text, messages, add_generation_prompt=False, **options)
    if literal:
        token = text[slice(*literal[0])]
        raise RequestError(f"its text has the control token {token!r}, which a server reads as plain text; change it")
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, after = (
            render(messages[:index], add_generation_prompt=True),
            render(messages[: index + 1], add_generation_prompt=False),
        )
        if not (after.startswith(before) and text.startswith(after)):
            raise RequestError(
                f"its template does not write messages[{index}] after those before it, "
                "so the assistant's words cannot be found"
            )
        if len(after) == len(before):
            raise RequestError(f"its template writes nothing of messages[{index}], the assistant's")
        spans.append((len(before), len(after)))
    return text, spans


class ChatProcess:
    """Renders chats in a process with limits, which starts with the first chat. Its owner closes it."""

    def __init__(self, model: Path):
        self._process = TextProcess(model, None, HANDLER)
        self.close = self._process.close

    def write(self, chats: Sequence[Chat]) -> list[Written | RequestError]:
        """Returns each chat's text and spans, or the error."""
        written: list[Written | RequestError] = []
        batch: list[str] = []
        for chat in chats:
            batch.append(json.dumps(chat, default=str))
            if len(batch) == BATCH_CHATS or sum(map(len, batch)) > BATCH_BYTES:
                written += self._batch(batch)
                batch = []
        return written + self._batch(batch)

    def _batch(self, batch: list[str]) -> list[Written | RequestError]:
        """If a batch exceeds the limits, it is rendered chat by chat, so that only the faulty chat is refused."""
        if not batch:
            return []
        try:
            answer = self._process.ask(f"[{','.join(batch)}]".encode(), len(batch))
        except RequestError as error:
            return [error] if len(batch) == 1 else [entry for text in batch for entry in self._batch([text])]
        return [
            RequestError(entry) if isinstance(entry, str) else (entry[0], [(begin, end) for begin, end in entry[1]])
            for entry in json.loads(answer)
        ]


def run(tokenizer: Tokenizer, _head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """The worker's handler: returns each chat's text and spans, or its error, as JSON."""
    written: list[Written | str] = []
    try:
        for messages, tools in json.loads(body):
            try:
                written.append(write_chat(messages, tools, tokenizer))
            except RequestError as error:
                written.append(str(error))
        return {}, json.dumps(written).encode()
    except (MemoryError, RecursionError):
        return {"refused": TOO_MUCH}, b""

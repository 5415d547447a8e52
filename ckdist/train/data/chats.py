"""Renders chats with their template, and divides them into turns.

A model's template is a program of strangers. A process with limits runs it, on many chats per call.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ckdist.errors import RequestError
from ckdist.tokens.text_process import TOO_MUCH, TextProcess
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.data.turns import Turn, turns_of

HANDLER = "ckdist.train.data.chats:run"
BATCH_TURNS, BATCH_BYTES = 64, 1 << 20  # limits of one message to the process

Messages: TypeAlias = list[Any]
Chat: TypeAlias = tuple[Messages, Sequence[dict[str, Any]]]  # messages, and the tools that they may call
Written: TypeAlias = list[Turn] | RequestError
WriteChats: TypeAlias = Callable[[Sequence[Chat]], list[Written]]


class ChatProcess:
    """Renders chats in a process with limits, which starts with the first chat. Its owner closes it."""

    def __init__(self, model: Path):
        self._process = TextProcess(model, None, HANDLER)
        self.close = self._process.close

    def write(self, chats: Sequence[Chat]) -> list[Written]:
        """Returns each chat's turns, or the error."""
        written: list[Written] = []
        batch: list[str] = []
        turns = size = 0
        for messages, tools in chats:
            batch.append(json.dumps([messages, tools], default=str))
            turns += sum(message["role"] == "assistant" for message in messages)
            size += len(batch[-1])
            if turns >= BATCH_TURNS or size > BATCH_BYTES:
                written += self._batch(batch, turns)
                batch = []
                turns = size = 0
        return written + self._batch(batch, turns)

    def _batch(self, batch: list[str], turns: int) -> list[Written]:
        """If a batch exceeds the limits, it is rendered chat by chat, so that only the faulty chat is refused."""
        if not batch:
            return []
        try:
            answer = self._process.ask(f"[{','.join(batch)}]".encode(), turns)
        except RequestError as error:
            return [error] if len(batch) == 1 else [entry for text in batch for entry in self._batch([text], turns)]
        return [
            RequestError(entry) if isinstance(entry, str) else [Turn(*turn) for turn in entry]
            for entry in json.loads(answer)
        ]


def run(tokenizer: Tokenizer, _head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """The worker's handler: returns each chat's turns, or its error, as JSON."""
    written: list[list[tuple[Any, ...]] | str] = []
    try:
        for messages, tools in json.loads(body):
            try:
                turns = turns_of(messages, tools, tokenizer)
                written.append([(turn.prompt, turn.answer, turn.learned, turn.notes) for turn in turns])
            except RequestError as error:
                written.append(str(error))
        return {}, json.dumps(written).encode()
    except (MemoryError, RecursionError):
        return {"refused": TOO_MUCH}, b""

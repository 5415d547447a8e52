"""Shared parts of OpenAI's answers: their first fields, and the end of each object or chunk."""

import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from ckdist.serve.answer import event, event_in_turns
from ckdist.serve.answer_choice import Piece
from ckdist.serve.encoding import TURN_ITEMS
from ckdist.serve.run import Run
from ckdist.tokens.vocabulary import Vocabulary


@dataclass(frozen=True)
class Source:
    """The model that answers."""

    model: str
    fingerprint: str  # changes with the model and with the version of this program


def new_head(kind: str, prefix: str, source: Source) -> dict[str, Any]:
    """Returns the fields that all parts of one answer share."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": source.model,
        "system_fingerprint": source.fingerprint,
    }


def end_of(piece: Piece) -> dict[str, Any]:
    """Returns the fields with the reason why a choice ended. `stop_reason` is vLLM's."""
    return {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}


class OpenAIAnswer:
    """One answer while it is generated, in the format of a subclass.

    Attributes:
        head: The fields that all its parts share.
    """

    def __init__(self, run: Run, tokenizer: Vocabulary, head: dict[str, Any]):
        self.run, self.tokenizer, self.work, self.head = run, tokenizer, run.work, head

    def _chunks(self, piece: Piece, is_first: bool) -> list[dict[str, Any]]:
        """Returns the chunks of a piece. `is_first`: it is its choice's first one."""
        raise NotImplementedError

    def _whole(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        end = {"usage": self.run.usage(), "timings": self.run.timings()}
        return {**self.head, "choices": choices, **more, **end}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields chunks as server-sent events."""
        begun: set[int] = set()
        with self.run as run:
            while pieces := await run.next():
                chunks = []
                for piece in pieces:
                    chunks += self._chunks(piece, piece.choice not in begun)
                    begun.add(piece.choice)
                if chunks:
                    yield await self._encoded(chunks, pieces)
        if self.work.include_usage:
            yield event(self._whole([]))

    async def _encoded(self, chunks: list[dict[str, Any]], pieces: list[Piece]) -> bytes:
        """Encodes chunks as server-sent events, with usage and timings if the request asks for them.

        llama-server's timings are in the very last chunk: the one with the usage, if the request asks for that.
        """
        work, extra = self.work, {}
        if work.include_usage:
            extra["usage"] = self.run.usage() if work.continuous_usage else None
        if work.timings_per_token:
            extra["timings"] = self.run.timings()
        for chunk in chunks:
            chunk.update(extra)
        if self.run.complete and not work.include_usage:
            chunks[-1]["timings"] = self.run.timings()
        if any(len(piece.scores) > TURN_ITEMS for piece in pieces):
            return b"".join([await event_in_turns(chunk) for chunk in chunks])
        return b"".join([event(chunk) for chunk in chunks])

    def _prompt_ids(self, choice: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.work.prompt_tokens(choice)} if self.work.token_ids else {}

    def _token_ids(self, piece: Piece) -> dict[str, Any]:
        return {"token_ids": piece.tokens} if self.work.token_ids else {}

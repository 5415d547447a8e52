"""Shared parts of OpenAI's answers: their first fields, and the end of each object or chunk."""

import secrets
import time
from dataclasses import dataclass
from typing import Any

from ckdist.serve.answer import event, event_in_turns
from ckdist.serve.answer_choice import Piece
from ckdist.serve.encoding import TURN_ITEMS
from ckdist.serve.run import Run


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


async def events(chunks: list[dict[str, Any]], run: Run, pieces: list[Piece]) -> bytes:
    """Encodes chunks as server-sent events, with usage and timings if the request asks for them.

    llama-server's timings are in the very last chunk: the one with the usage, if the request asks for that.
    """
    work, extra = run.work, {}
    if work.include_usage:
        extra["usage"] = run.usage() if work.continuous_usage else None
    if work.timings_per_token:
        extra["timings"] = run.timings()
    for chunk in chunks:
        chunk.update(extra)
    if run.complete and not work.include_usage:
        chunks[-1]["timings"] = run.timings()
    if any(len(piece.scores) > TURN_ITEMS for piece in pieces):
        return b"".join([await event_in_turns(chunk) for chunk in chunks])
    return b"".join([event(chunk) for chunk in chunks])


def usage_event(head: dict[str, Any], run: Run) -> bytes:
    """Returns the last chunk of a stream with usage."""
    return event({**head, "choices": [], "usage": run.usage(), "timings": run.timings()})

"""What the answers of both OpenAI paths share: their first fields, and what ends each object or chunk."""

import secrets
import time
from dataclasses import dataclass
from typing import Any

from ckdist.serve.answer import event, event_in_turns
from ckdist.serve.choice import Piece
from ckdist.serve.encoding import TURN_ITEMS
from ckdist.serve.run import Run


@dataclass(frozen=True)
class Source:
    """Who answers: the model's name, and a fingerprint that changes with the model or this program."""

    model: str
    fingerprint: str


def new_head(kind: str, prefix: str, source: Source) -> dict[str, Any]:
    """The fields that every part of one answer shares."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": source.model,
        "system_fingerprint": source.fingerprint,
    }


def end_of(piece: Piece) -> dict[str, Any]:
    """Why a choice ended; `stop_reason` is vLLM's."""
    return {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}


async def events(chunks: list[dict[str, Any]], run: Run, pieces: list[Piece]) -> bytes:
    """One batch of chunks as server-sent events, with the usage and timings that were asked for.

    llama-server's timings stand in the last chunk of all: that of the usage, where it was asked for.
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
    """The last chunk of a stream that was asked for its usage."""
    return event({**head, "choices": [], "usage": run.usage(), "timings": run.timings()})

"""Anthropic's /v1/messages/batches, over the same room as OpenAI's batches."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from datetime import datetime, timezone
from typing import Any

from starlette.responses import Response, StreamingResponse

from ckdist.errors import RequestError
from ckdist.serve.answer import json_answer
from ckdist.serve.batch_lines import BadLine, BadLinesError, check_body, request_of
from ckdist.serve.batch_runner import BatchRunner
from ckdist.serve.batch_store import MAX_FILE, MAX_LINES, OPEN
from ckdist.serve.body import read_body
from ckdist.serve.encoding import to_json
from ckdist.serve.paths.file_batches import WINDOW_SECONDS, page, room_of
from ckdist.serve.paths.path import Path, Request, Service
from ckdist.serve.problems import ANTHROPIC_TYPES, Problem
from ckdist.serve.requests.json_body import parse_object

FACE = "anthropic"
URL = "/v1/messages"
ENDED_BY_BATCH = {"batch_cancelled": "canceled", "batch_expired": "expired"}


async def batches(service: Service, request: Request) -> Response:
    """GET: all batches. POST: makes one of a list of requests."""
    room, owner = room_of(service, request)
    if request.method == "GET":
        shown = page(request, [_batch(request, room, one) for one in room.store.batches(owner, FACE)])
        return json_answer({name: shown[name] for name in ("data", "has_more", "first_id", "last_id")})
    given = parse_object(await read_body(request, MAX_FILE)).get("requests")
    if not isinstance(given, list) or not given or len(given) > MAX_LINES:
        raise Problem(400, f"requests is needed: a list of 1 to {MAX_LINES} requests", "requests")
    lines = _checked(given, service.settings.strict_fields)
    size = sum(map(len, lines))
    room.store.check_room(size)
    with room.store.upload(owner) as path:
        await asyncio.to_thread(path.write_bytes, b"".join(lines))
        found = room.store.add_file(owner, path, "message_batch", "requests.jsonl")
    facts = {"input_file_id": found["id"], "endpoint": URL, "total": len(lines)}
    added = room.store.add_batch(owner, FACE, int(time.time()) + WINDOW_SECONDS, facts)
    return json_answer(_batch(request, room, added))


async def batch(service: Service, request: Request) -> Response:
    """GET: a batch, or with /results its results. POST with /cancel: ends it. DELETE: removes it and its results."""
    room, owner = room_of(service, request)
    name, _, what = request.path_params["name"].partition("/")
    found = room.store.batch(owner, FACE, name)
    if request.method == "DELETE" and not what:
        room.store.remove_batch(owner, FACE, name)
        return json_answer({"id": name, "type": "message_batch_deleted"})
    if what == "results" and request.method == "GET":
        if found["status"] in OPEN:
            raise Problem(400, f"{name} has not ended: it is {found['status']}")
        return StreamingResponse(_results(room, found), media_type="application/x-jsonl")
    if what == "cancel" and request.method == "POST":
        if found["status"] in OPEN:
            found = room.store.change(name, "cancelling", cancelling_at=int(time.time()))
    elif what or request.method != "GET":
        raise Problem(404, f"there is no path {request.url.path[:200]!r}")
    return json_answer(_batch(request, room, found))


def _checked(requests: list[Any], strict: bool) -> list[bytes]:
    """Returns the lines of the requests. Raises BadLinesError if some are wrong."""
    lines, bad, seen = list[bytes](), list[BadLine](), dict[str, int]()
    for number, item in enumerate(requests, 1):
        try:
            if not isinstance(item, dict):
                raise RequestError("it must be an object")
            made = {"custom_id": item.get("custom_id"), "url": URL, "body": item.get("params")}
            custom_id, _, body = request_of(made, URL)
            if custom_id in seen:
                raise RequestError(f"custom_id {custom_id[:64]!r} is that of request {seen[custom_id]}, too")
            check_body(URL, body, strict)
        except RequestError as error:
            bad.append(BadLine(number, str(error)))
            continue
        seen[custom_id] = number
        lines.append(to_json(made) + b"\n")
    if bad:
        raise BadLinesError("requests", bad, len(requests))
    return lines


async def _results(room: BatchRunner, found: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Yields a line for each request."""
    for file_id in filter(None, (found.get("output_file_id"), found.get("error_file_id"))):
        with room.store.path(file_id).open("rb") as file:
            for line in file:
                yield to_json(_result(json.loads(line))) + b"\n"


def _result(line: dict[str, Any]) -> dict[str, Any]:
    response, error = line["response"], line["error"]
    if response is not None and response["status_code"] == 200:
        result = {"type": "succeeded", "message": response["body"]}
    elif response is not None:
        body = response["body"]
        kind = ANTHROPIC_TYPES.get(response["status_code"], "invalid_request_error")
        told = body if body.get("type") == "error" else {"type": "error", "error": {"type": kind, "message": str(body)}}
        result = {"type": "errored", "error": told}
    else:
        result = {"type": ENDED_BY_BATCH.get(error["code"], "errored")}
    return {"custom_id": line["custom_id"], "result": result}


def _batch(request: Request, room: BatchRunner, found: dict[str, Any]) -> dict[str, Any]:
    total, completed, failed = room.counts(found)
    ended = found["status"] not in OPEN
    left = max(0, total - completed - failed)
    unrun = found.get("unrun", 0) if ended else 0
    counts = {"processing": 0 if ended else left, "succeeded": completed, "errored": failed - unrun}
    cancelled = unrun if found["status"] == "cancelled" else 0
    counts |= {"canceled": cancelled, "expired": unrun - cancelled}
    ends = (found.get(f"{name}_at") for name in ("completed", "cancelled", "expired", "failed"))
    status = "ended" if ended else "canceling" if found["status"] == "cancelling" else "in_progress"
    base = str(request.base_url).rstrip("/")
    return {
        "id": found["id"],
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": _moment(found["created_at"]),
        "expires_at": _moment(found["expires_at"]),
        "ended_at": _moment(next(filter(None, ends), None)),
        "cancel_initiated_at": _moment(found.get("cancelling_at")),
        "archived_at": None,
        "results_url": f"{base}{URL}/batches/{found['id']}/results" if ended else None,
    }


def _moment(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


PATHS = (
    Path("/v1/messages/batches", batches, ("GET", "POST")),
    Path("/v1/messages/batches/{name:path}", batch, ("GET", "POST", "DELETE")),
)

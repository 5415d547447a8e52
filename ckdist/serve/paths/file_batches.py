"""OpenAI's /v1/files and /v1/batches."""

import asyncio
import time
from typing import Any

from starlette.responses import FileResponse, Response

from ckdist.serve.answer import json_answer
from ckdist.serve.batch_lines import PATHS as ENDPOINTS
from ckdist.serve.batch_runner import BatchRunner
from ckdist.serve.batch_store import MAX_FILE, OPEN
from ckdist.serve.body import read_body
from ckdist.serve.paths.path import Path, Request, Service
from ckdist.serve.problems import Problem
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.upload_form import receive_form

FACE = "openai"
UPLOAD_SECONDS = 600.0
WINDOW_SECONDS = 24 * 3600
WINDOW = "24h"
MAX_METADATA = 16
MAX_LISTED = 100
PART_BYTES = 64 << 10
TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip


def room_of(service: Service, request: Request) -> tuple[BatchRunner, str]:
    """Returns the folder of batches and the client's name. Raises Problem 404 without --batch-dir."""
    if service.batches is None:
        message = "files and batches are not kept: start the server with --batch-dir DIR"
        raise Problem(404, message, code="not_supported")
    return service.batches, request.scope["ckdist.account"].name


async def files(service: Service, request: Request) -> Response:
    """GET: all files. POST: keeps an uploaded file."""
    room, owner = room_of(service, request)
    if request.method == "POST":
        return json_answer(_file(await _upload(service, request, room, owner)))
    found = [_file(one) for one in room.store.files(owner, request.query_params.get("purpose"))]
    return json_answer(page(request, found))


async def file(service: Service, request: Request) -> Response:
    """GET: a file's facts, or with /content its contents. DELETE: removes it."""
    room, owner = room_of(service, request)
    name, _, what = request.path_params["name"].partition("/")
    if what not in ("", "content") or (what and request.method != "GET"):
        raise Problem(404, f"there is no path {request.url.path[:200]!r}", code="unknown_url")
    if request.method == "DELETE":
        room.store.remove_file(owner, name)
        return json_answer({"id": name, "object": "file", "deleted": True})
    found = room.store.file(owner, name)
    if what:
        return FileResponse(room.store.path(found["id"]), media_type="application/octet-stream")
    return json_answer(_file(found))


async def batches(service: Service, request: Request) -> Response:
    """GET: all batches. POST: makes one of an uploaded file."""
    room, owner = room_of(service, request)
    if request.method == "GET":
        return json_answer(page(request, [_batch(room, one) for one in room.store.batches(owner, FACE)]))
    fields = Fields(parse_object(await read_body(request, service.settings.max_body)))
    file_id, endpoint = fields.text("input_file_id", ""), fields.text("endpoint", "")
    room.store.file(owner, file_id)
    if endpoint not in ENDPOINTS:
        message = f"endpoint ({endpoint[:64]!r}) must be one of {', '.join(ENDPOINTS)}"
        raise Problem(400, message, "endpoint", "invalid_value")
    if (window := fields.text("completion_window", WINDOW)) != WINDOW:
        message = f"completion_window ({window[:32]!r}) must be {WINDOW}"
        raise Problem(400, message, "completion_window", "invalid_value")
    metadata = fields.value("metadata", dict) or {}
    fits = all(isinstance(value, str) and len(value) <= 512 for value in metadata.values())
    if len(metadata) > MAX_METADATA or not fits:
        raise Problem(400, f"metadata must have at most {MAX_METADATA} strings of 512 characters", "metadata")
    facts = {"input_file_id": file_id, "endpoint": endpoint, "metadata": metadata}
    return json_answer(_batch(room, room.store.add_batch(owner, FACE, int(time.time()) + WINDOW_SECONDS, facts)))


async def batch(service: Service, request: Request) -> Response:
    """GET: a batch. POST with /cancel: ends it; its results stay."""
    room, owner = room_of(service, request)
    name, _, what = request.path_params["name"].partition("/")
    found = room.store.batch(owner, FACE, name)
    if what == "cancel" and request.method == "POST":
        if found["status"] not in OPEN:
            raise Problem(409, f"{name} is {found['status']} and cannot be cancelled", code="invalid_state")
        found = room.store.change(name, "cancelling", cancelling_at=int(time.time()))
    elif what or request.method != "GET":
        raise Problem(404, f"there is no path {request.url.path[:200]!r}", code="unknown_url")
    return json_answer(_batch(room, found))


def page(request: Request, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a list as OpenAI does: at most `limit` entries after the id `after`. Raises Problem 400 for others."""
    after, limit = request.query_params.get("after"), request.query_params.get("limit", "20")
    if not limit.isdigit() or not 1 <= int(limit[:6]) <= 10_000:
        raise Problem(400, f"limit ({limit[:32]!r}) must be from 1 to 10000", "limit", "invalid_value")
    ids = [one["id"] for one in found]
    if after is not None and after not in ids:
        raise Problem(404, f"there is no entry {after[:64]!r}", "after", "not_found")
    begin = 0 if after is None else ids.index(after) + 1
    shown = found[begin : begin + min(int(limit), MAX_LISTED)]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, **ends, "has_more": begin + len(shown) < len(found)}


async def _upload(service: Service, request: Request, room: BatchRunner, owner: str) -> dict[str, Any]:
    """Keeps the file of a form. Raises Problem for a form without one, and for one that is too large."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:18]) > MAX_FILE + PART_BYTES:
        raise Problem(413, f"the file has about {length[:18]} bytes, of at most {MAX_FILE}")
    room.store.check_room(int(length[:18]) if length.isdigit() else 0)
    with room.store.upload(owner) as path:
        try:
            form = receive_form(request, {"file": path}, MAX_FILE)
            names, fields = await asyncio.wait_for(form, UPLOAD_SECONDS)
        except asyncio.TimeoutError:
            raise Problem(408, f"the file did not arrive within {UPLOAD_SECONDS:.0f} seconds") from None
        if (purpose := fields.get("purpose", "")) != "batch":
            raise Problem(400, f"purpose ({purpose[:32]!r}) must be batch", "purpose", "invalid_value")
        return room.store.add_file(owner, path, purpose, names["file"])


def _file(found: dict[str, Any]) -> dict[str, Any]:
    shown = {name: found[name] for name in ("id", "bytes", "created_at", "filename", "purpose")}
    return {**shown, "object": "file", "status": "processed", "expires_at": None}


def _batch(room: BatchRunner, found: dict[str, Any]) -> dict[str, Any]:
    total, completed, failed = room.counts(found)
    errors = found.get("errors")
    return {
        "id": found["id"],
        "object": "batch",
        "endpoint": found["endpoint"],
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": found["input_file_id"],
        "completion_window": WINDOW,
        "status": found["status"],
        "output_file_id": found.get("output_file_id"),
        "error_file_id": found.get("error_file_id"),
        "created_at": found["created_at"],
        "expires_at": found["expires_at"],
        **{name: found.get(name) for name in TIMES},
        "request_counts": {"total": total, "completed": completed, "failed": failed},
        "metadata": found.get("metadata") or None,
    }


BOTH, ALL = ("GET", "POST"), ("GET", "POST", "DELETE")
PATHS = (
    Path("/v1/files", files, BOTH),
    Path("/v1/files/{name:path}", file, ALL),
    Path("/v1/batches", batches, BOTH),
    Path("/v1/batches/{name:path}", batch, BOTH),
)

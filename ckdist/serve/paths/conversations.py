"""OpenAI's /v1/conversations: lists of items that responses read and add to."""

import json
import time
from typing import Any

from ckdist.serve.answer import LongAnswer, json_answer
from ckdist.serve.body import read_body
from ckdist.serve.paths.path import Path, Request, Response, Service
from ckdist.serve.paths.stored_responses import page_of
from ckdist.serve.problems import Problem
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.requests.kept_items import conversation_fields
from ckdist.serve.response_store import Conversation, Items, new_name

MAX_BYTES = 512 << 10  # of a body, which this process parses: no model has to be loaded


async def create(service: Service, request: Request) -> Response:
    """Makes a conversation."""
    items, metadata = await _given(service, request)
    account = request.scope["ckdist.account"]
    talk = Conversation(
        new_name("conv"), account.name, account.client, created=int(time.time()), metadata=metadata or {}, items=items
    )
    _put(service, talk)
    return json_answer(_shown(talk))


async def read(service: Service, request: Request) -> Response:
    """A conversation, its items, or one of them."""
    talk, rest = _named(service, request)
    if not rest:
        return json_answer(_shown(talk))
    if rest == ["items"]:
        return LongAnswer(page_of(talk.items, request))
    return LongAnswer([talk.items[_place(talk, rest)][1]])


async def change(service: Service, request: Request) -> Response:
    """Replaces the metadata of a conversation, or adds items to it."""
    talk, rest = _named(service, request)
    items, metadata = await _given(service, request)
    if rest == ["items"]:
        if not items or metadata is not None:
            raise Problem(400, "items is needed, without metadata", "items")
        talk.items = (*talk.items, *items)
        _put(service, talk)
        data = [json.loads(body) for _, body in items]
        ends = {"first_id": items[0][0], "last_id": items[-1][0], "has_more": False}
        return json_answer({"object": "list", "data": data, **ends})
    if rest:
        raise Problem(405, "an item cannot be changed; delete it and add another", code="method_not_supported")
    if metadata is None or items:
        raise Problem(400, "metadata is needed, without items: those go to /items", "metadata")
    talk.metadata = metadata
    _put(service, talk)
    return json_answer(_shown(talk))


async def delete(service: Service, request: Request) -> Response:
    """Removes a conversation, or one of its items."""
    talk, rest = _named(service, request)
    if not rest:
        service.kept.drop(talk)
        return json_answer({"id": talk.id, "object": "conversation.deleted", "deleted": True})
    at = _place(talk, rest)
    talk.items = (*talk.items[:at], *talk.items[at + 1 :])
    _put(service, talk)
    return json_answer(_shown(talk))


async def _given(service: Service, request: Request) -> tuple[Items, dict[str, str] | None]:
    """Returns the items and the metadata of the body."""
    body = await read_body(request, min(MAX_BYTES, service.settings.max_body)) or b"{}"
    return conversation_fields(parse_object(body))


def _put(service: Service, talk: Conversation) -> None:
    """Keeps a conversation. Raises Problem if nothing is kept, or if it is too large now, and is dropped."""
    service.kept.put(talk)
    if not service.kept.has(talk):
        if not service.kept.seconds:
            raise Problem(404, "conversations are not kept (--store-responses 0); send all messages")
        raise Problem(413, f"conversation {talk.id!r} has {talk.size} bytes, which is too much, and was dropped")


def _named(service: Service, request: Request) -> tuple[Conversation, list[str]]:
    """Returns the conversation in the path, and the parts of the path after it."""
    name, *rest = request.path_params["name"].split("/")
    talk = service.kept.find(Conversation, name, request.scope["ckdist.account"].name, "conversation")
    if rest and (rest[0] != "items" or len(rest) > 2):
        raise Problem(404, f"a conversation has no {'/'.join(rest)[:80]!r}; it has items", code="unknown_url")
    return talk, rest


def _place(talk: Conversation, rest: list[str]) -> int:
    """Returns the position of the item in the path. Raises Problem 404 if there is none."""
    name = rest[-1] if len(rest) == 2 else ""
    place = next((i for i, (own, _) in enumerate(talk.items) if own == name), None)
    if place is None:
        raise Problem(404, f"conversation {talk.id!r} has no item {name[:80]!r}", code="not_found")
    return place


def _shown(talk: Conversation) -> dict[str, Any]:
    return {"id": talk.id, "object": "conversation", "created_at": talk.created, "metadata": talk.metadata}


PATHS = (
    Path("/v1/conversations", create, ("POST",)),
    Path("/v1/conversations/{name:path}", read),
    Path("/v1/conversations/{name:path}", change, ("POST",)),
    Path("/v1/conversations/{name:path}", delete, ("DELETE",)),
)

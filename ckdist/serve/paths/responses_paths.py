"""OpenAI's /v1/responses and /v1/conversations."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ckdist.serve.answer import json_answer
from ckdist.serve.body import read_body
from ckdist.serve.encoding import to_json
from ckdist.serve.kept_items import Item, Kept, KeptItems, input_items, new_conversation
from ckdist.serve.paths.path import Path
from ckdist.serve.problems import Problem
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.responses_answer import ResponsesAnswer
from ckdist.serve.run import Run
from ckdist.serve.service import Service
from ckdist.tokens.vocabulary import Vocabulary

NO_END = b""  # these streams end with their last event
RESPONSE, CONVERSATION = "response", "conversation"
MAX_LISTED = 100


async def create(service: Service, request: Request) -> Response:
    """The answer to an input, as items. With --store-responses it continues others and is kept."""
    service.check_ready()
    body = parse_object(await read_body(request, service.settings.max_body))
    kept, account = service.kept, request.scope["ckdist.account"]
    if kept is None:
        given = await service.prepare("response", request, to_json(body))
        return await service.answer(request, given, ResponsesAnswer, NO_END)
    fields = Fields(body)
    earlier, conversation = _earlier(fields, kept, account)
    own = input_items(body.get("input"))
    whole = {
        name: value for name, value in body.items() if name not in ("previous_response_id", "conversation", "store")
    }
    whole["input"] = [*(earlier.items if earlier else ()), *own] if earlier else body.get("input")
    prepared = await service.prepare("response", request, await asyncio.to_thread(to_json, whole))
    stores = fields.switch("store", True)
    told = {"previous_response_id": body.get("previous_response_id"), "store": stores}
    if conversation is not None:
        told["conversation"] = {"id": conversation.shown["id"]}
    prepared.echoed.update(told)

    def finish(response: dict[str, Any]) -> None:
        """Keeps a response that is complete."""
        items = [*(earlier.items if earlier else ()), *own]
        if conversation is not None:
            conversation.items += [*own, *response["output"]]
            kept.keep(account, conversation)
        if stores:
            kept.keep(account, Kept([*items, *response["output"]], response, len(items)))

    def answer(run: Run, tokenizer: Vocabulary, source: Any) -> ResponsesAnswer:
        made = ResponsesAnswer(run, tokenizer, source)
        made.on_end = finish
        return made

    return await service.answer(request, prepared, answer, NO_END)


async def response(service: Service, request: Request) -> Response:
    """GET: a kept response, or its /input_items. DELETE: forgets it."""
    kept, account = _room(service), request.scope["ckdist.account"]
    name, _, what = request.path_params["name"].partition("/")
    found = kept.find(account, name, RESPONSE)
    if request.method == "DELETE" and not what:
        kept.drop(account, name)
        return json_answer({"id": name, "object": "response", "deleted": True})
    if what == "input_items" and request.method == "GET":
        return json_answer(_page(request, found.items[: found.inputs]))
    if what or request.method != "GET":
        raise Problem(404, f"there is no path {request.url.path[:200]!r}", code="unknown_url")
    return json_answer(found.shown)


async def conversations(service: Service, request: Request) -> Response:
    """Begins a conversation."""
    fields = Fields(parse_object(await read_body(request, service.settings.max_body) or b"{}"))
    made = new_conversation(input_items(fields.value("items", list)), fields.value("metadata", dict) or {})
    _room(service).keep(request.scope["ckdist.account"], made)
    return json_answer(made.shown)


async def conversation(service: Service, request: Request) -> Response:
    """GET, POST and DELETE of a conversation, of its /items, and of one of these."""
    kept, account = _room(service), request.scope["ckdist.account"]
    name, _, rest = request.path_params["name"].partition("/")
    found, method = kept.find(account, name, CONVERSATION), request.method
    what, _, item_id = rest.partition("/")
    body = {}
    if method == "POST":
        body = parse_object(await read_body(request, service.settings.max_body))
    if not rest and method == "DELETE":
        kept.drop(account, name)
        return json_answer({"id": name, "object": "conversation.deleted", "deleted": True})
    if not rest:
        if method == "POST":
            metadata = Fields(body).value("metadata", dict) or {}
            found.shown["metadata"] = new_conversation([], metadata).shown["metadata"]
            kept.keep(account, found)
        return json_answer(found.shown)
    if what == "items" and not item_id:
        if method == "POST":
            added = input_items(Fields(body).value("items", list))
            found.items += added
            kept.keep(account, found)
            return json_answer(_page(request, added))
        return json_answer(_page(request, found.items))
    if what == "items" and method in ("GET", "DELETE"):
        item = next((one for one in found.items if one["id"] == item_id), None)
        if item is None:
            raise Problem(404, f"the conversation has no item {item_id[:64]!r}", code="not_found")
        if method == "GET":
            return json_answer(item)
        found.items.remove(item)
        kept.keep(account, found)
        return json_answer(found.shown)
    raise Problem(404, f"there is no path {request.url.path[:200]!r}", code="unknown_url")


def _room(service: Service) -> KeptItems:
    if service.kept is None:
        raise Problem(404, "nothing is kept: start the server with --store-responses SECONDS", code="not_supported")
    return service.kept


def _earlier(fields: Fields, kept: KeptItems, account: Any) -> tuple[Kept | None, Kept | None]:
    """Returns the entry that the input continues, and the conversation that grows, if there is one."""
    previous, given = fields.text("previous_response_id"), fields.value("conversation", str, dict)
    if previous is not None and given is not None:
        raise Problem(400, "previous_response_id and conversation both continue something; give one", "conversation")
    if previous is not None:
        return kept.find(account, previous, RESPONSE), None
    if given is None:
        return None, None
    name = given if isinstance(given, str) else Fields(given, "conversation").text("id", "")
    found = kept.find(account, name, CONVERSATION)
    return found, found


def _page(request: Request, items: list[Item]) -> dict[str, Any]:
    """Returns a list of items as OpenAI does: the newest first, unless `order` is asc, after the id `after`."""
    order, after, limit = (request.query_params.get(name) for name in ("order", "after", "limit"))
    shown = items if order == "asc" or request.method == "POST" else items[::-1]
    ids = [item["id"] for item in shown]
    if after is not None and after not in ids:
        raise Problem(404, f"there is no item {after[:64]!r}", "after", "not_found")
    begin = 0 if after is None else ids.index(after) + 1
    count = int(limit) if limit is not None and limit.isdigit() and len(limit) < 5 else 20
    part = shown[begin : begin + min(max(1, count), MAX_LISTED)]
    ends = {"first_id": part[0]["id"] if part else None, "last_id": part[-1]["id"] if part else None}
    return {"object": "list", "data": part, **ends, "has_more": begin + len(part) < len(shown)}


KEPT_PATHS = (  # they need no model
    Path("/v1/responses/{name:path}", response, ("GET", "DELETE")),
    Path("/v1/conversations", conversations, ("POST",)),
    Path("/v1/conversations/{name:path}", conversation, ("GET", "POST", "DELETE")),
)
PATHS = (Path("/v1/responses", create, ("POST",)), *KEPT_PATHS)

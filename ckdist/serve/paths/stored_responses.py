"""OpenAI's /v1/responses: answers as items, which later requests continue."""

import json
from functools import partial
from typing import Any

from msgspec import structs

from ckdist.serve.accounts import Account
from ckdist.serve.answer import NO_END, LongAnswer, json_answer
from ckdist.serve.body import read_body
from ckdist.serve.encoding import to_json
from ckdist.serve.paths.path import Path, Request, Response, Service
from ckdist.serve.problems import Problem
from ckdist.serve.response_store import Conversation, Items, KeptResponse, ResponseStore
from ckdist.serve.responses_answer import ResponsesAnswer

LINKS = (b'"previous_response_id"', b'"conversation"')
MOST_ITEMS = 100  # of one page


async def create(service: Service, request: Request) -> Response:
    """The answer to an input, as items. It continues a kept response, or a conversation."""
    service.check_ready()
    body = await read_body(request, service.settings.max_body)
    kind, before, talk = "response", (), None
    if any(name in body for name in LINKS):
        links = json.loads(b"".join(await service.finished("response_links", request, body)))
        before, talk = _before(service.kept, links, request.scope["ckdist.account"])
        if before or talk is not None:
            kind, body = "response_continued", b'{"history":[%b],"body":%b}' % (_joined(before), body)
    work = await service.prepare(kind, request, body)
    stays = bool(work.echoed["store"] and service.kept.seconds)
    more = {"store": stays, "conversation": None if talk is None else {"id": talk.id}}
    work = structs.replace(work, echoed={**work.echoed, **more})
    given = (*before, *work.items)
    keep = partial(_keep, service.kept, request.scope["ckdist.account"], given, talk, len(work.items))
    return await service.answer(request, work, partial(ResponsesAnswer, keep=keep), NO_END)


def _before(store: ResponseStore, links: dict[str, Any], account: Account) -> tuple[Items, Conversation | None]:
    """Returns the items that come before the request's own, and the conversation that grows."""
    previous, name = links["previous_response_id"], links["conversation"]
    if previous is not None:
        kept = store.find(KeptResponse, previous, account.name, "response", "previous_response_id")
        return (*kept.given, *kept.output), None
    if name is not None:
        talk = store.find(Conversation, name, account.name, "conversation", "conversation")
        return talk.items, talk
    return (), None


def _keep(
    store: ResponseStore, account: Account, given: Items, talk: Conversation | None, own: int, response: dict[str, Any]
) -> None:
    """Keeps a finished response. The last `own` of the `given` items are the request's; `talk` grows by them."""
    output = tuple((item["id"], to_json(item)) for item in response["output"])
    if talk is not None and store.has(talk):
        talk.items = (*talk.items, *given[len(given) - own :], *output)
        store.put(talk)
    if response["store"]:
        body = to_json(response)
        store.put(KeptResponse(response["id"], account.name, account.client, body=body, given=given, output=output))


async def kept_response(service: Service, request: Request) -> Response:
    """A kept response, or the items that it was made from."""
    name, _, rest = request.path_params["name"].partition("/")
    kept = service.kept.find(KeptResponse, name, request.scope["ckdist.account"].name, "response")
    if request.method == "POST":
        raise Problem(400, f"response {name[:80]!r} has ended, and {rest[:40]!r} needs one in the background; leave it")
    if rest == "input_items":
        return LongAnswer(page_of(kept.given, request))
    if rest:
        raise Problem(404, f"a response has no {rest[:80]!r}; it has input_items", code="unknown_url")
    if request.query_params.get("stream", "false") not in ("false", "0"):
        raise Problem(400, "kept responses are not streamed; leave stream out", "stream", "unsupported_parameter")
    return LongAnswer([kept.body])


async def delete_response(service: Service, request: Request) -> Response:
    """Removes a kept response."""
    owner = request.scope["ckdist.account"].name
    kept = service.kept.find(KeptResponse, request.path_params["name"], owner, "response")
    service.kept.drop(kept)
    return json_answer({"id": kept.id, "object": "response", "deleted": True})


def page_of(items: Items, request: Request) -> list[bytes]:
    """Returns a page of items as JSON in parts: `limit` of them, in `order`, `after` an id."""
    asked = request.query_params
    order, after, limit = asked.get("order", "desc"), asked.get("after"), asked.get("limit", "20")
    if order not in ("asc", "desc"):
        raise Problem(400, f"order ({order[:20]!r}) must be asc or desc", "order")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= MOST_ITEMS:
        raise Problem(400, f"limit ({limit[:20]!r}) must be from 1 to {MOST_ITEMS}", "limit")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        at = next((i for i, (name, _) in enumerate(ordered) if name == after), None)
        if at is None:
            raise Problem(404, f"there is no item {after[:80]!r}", "after", "not_found")
        ordered = ordered[at + 1 :]
    shown = ordered[: int(limit)]
    ends = {"first_id": shown[0][0], "last_id": shown[-1][0]} if shown else {"first_id": None, "last_id": None}
    tail = to_json({**ends, "has_more": len(shown) < len(ordered), "object": "list"})
    return [b'{"data":[', _joined(shown), b"],", tail[1:]]


def _joined(items: Items) -> bytes:
    return b",".join(body for _, body in items)


KEPT_PATHS = (  # they need no model
    Path("/v1/responses/{name:path}", kept_response, ("GET", "POST")),
    Path("/v1/responses/{name:path}", delete_response, ("DELETE",)),
)
PATHS = (Path("/v1/responses", create, ("POST",)), *KEPT_PATHS)

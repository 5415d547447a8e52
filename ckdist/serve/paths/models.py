"""The paths of a server with several models: the list, loading and unloading, as llama-server's router has them.

All other paths are those of one model, which the request names.
"""

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from ckdist.serve.answer import json_answer, while_connected
from ckdist.serve.batch_runner import BATCH
from ckdist.serve.body import read_body, receive_again, receive_nothing
from ckdist.serve.hosted_model import HostedModel
from ckdist.serve.model_router import Hold, ModelRouter
from ckdist.serve.paths import model_changes, ollama, status
from ckdist.serve.paths.lora_paths import entry
from ckdist.serve.paths.path import Path, Request, Response
from ckdist.serve.problems import Problem
from ckdist.serve.upload_form import FORM

MAX_ORDER_BYTES = 1 << 16  # a body of /models/load


class Named(msgspec.Struct):
    """The part of a body that finds its model. The other fields are skipped."""

    model: Any = None
    name: Any = None  # Ollama's older clients
    keep_alive: Any = None  # Ollama's


class HeldAnswer(Response):
    """An answer whose model stays loaded until the last byte is sent."""

    def __init__(self, answer: Response, hold: Hold) -> None:
        self.answer, self.hold, self.background = answer, hold, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer."""
        try:
            await self.answer(scope, receive, send)
        finally:
            self.hold.release()


async def pass_on(router: ModelRouter, path: Path, request: Request) -> Response:
    """Loads the request's model if necessary, and answers with it."""
    is_form = request.headers.get("content-type", "").startswith(FORM)  # ?model= names its model
    has_body = request.method not in ("GET", "HEAD") and not is_form
    body = await read_body(request, router.settings.max_body) if has_body else b""
    named, is_ollama = _named_in(body), path.name.startswith("/api/")
    name = _text(named.model or (named.name if is_ollama else None)) or request.query_params.get("model")
    model = router.find(name) if name is not None or has_body or is_form else router.current()
    request.scope["ckdist.model"] = model.name
    if is_ollama and named.keep_alive is not None:
        model.keep_alive = request.scope["ckdist.keep_alive"] = ollama.read_keep_alive(named.keep_alive)
    hold = router.hold(model)
    try:
        load = router.load(hold, waits=BATCH not in request.scope)
        receive = receive_nothing if is_form else request.receive  # the form's file is read below
        await while_connected(receive, load, lambda: hold.begun, router.settings.timeout + 1)
        receive = receive_again(body, request.receive) if has_body else request.receive
        answer = await path.handle(model.service, Request(request.scope, receive))
    except BaseException:
        hold.release()
        raise
    return HeldAnswer(answer, hold)


async def models(router: ModelRouter, request: Request) -> Response:
    """All models and their adapters, loaded or not."""
    found = []
    for model in router.models.values():
        found += [_described(model), *(_described_adapter(model, name) for name in model.adapters)]
    return json_answer({"object": "list", "data": found})


async def model(router: ModelRouter, request: Request) -> Response:
    """The model of this name or alias, or the adapter. Raises Problem 404 for other names."""
    name = request.path_params["name"]
    model = router.find(name)
    adapter = model.adapter(name)
    return json_answer(_described(model) if adapter is None else _described_adapter(model, adapter))


async def load(router: ModelRouter, request: Request) -> Response:
    """Begins to load a model. Raises Problem 503 if there is no room for it."""
    await router.begin(await _ordered(router, request), waits=False, is_order=True)
    return json_answer({"success": True})


async def unload(router: ModelRouter, request: Request) -> Response:
    """Unloads a model. Raises Problem 409 if it has requests."""
    await router.unload(await _ordered(router, request))
    return json_answer({"success": True})


async def machine(router: ModelRouter, request: Request) -> Response:
    """The state of the machine, as one model's ranks show it: the model that ?model= names, or the one used last."""
    name = request.query_params.get("model")
    return await status.machine((router.find(name) if name else router.current()).service, request)


async def health(router: ModelRouter, request: Request) -> Response:
    """200 if requests can be answered: models load when they are needed. Else Problem 503."""
    if router.draining:
        raise Problem(503, "the server is shutting down")
    first = [model for model in router.models.values() if model.hosted.at_start]
    loading = [model.name for model in first if model.state == "loading" and not model.restarts]
    if loading:
        raise Problem(503, f"{', '.join(loading)} is loading; try again soon")
    return json_answer({"status": "ok"})


async def ollama_tags(router: ModelRouter, request: Request) -> Response:
    """All models, as Ollama lists them."""
    return json_answer({"models": [ollama.entry(model.service) for model in router.models.values()]})


async def ollama_loaded(router: ModelRouter, request: Request) -> Response:
    """The loaded models, as Ollama lists them."""
    found = [model.service for model in router.models.values() if model.state == "loaded"]
    return json_answer({"models": [ollama.loaded_entry(service) for service in found]})


async def _ordered(router: ModelRouter, request: Request) -> HostedModel:
    if router.accounts.have_rights:
        model_changes.check_allowed(router, request)
    name = _text(_named_in(await read_body(request, MAX_ORDER_BYTES)).model)
    if name is None:
        raise Problem(400, 'model is missing; send {"model": "NAME"}', "model")
    return router.find(name)


def _named_in(body: bytes) -> Named:
    """Returns the fields that find the model. A list has none. Raises Problem 400 if the body is not JSON."""
    try:
        return msgspec.json.decode(body, type=Named) if body and not body.lstrip().startswith(b"[") else Named()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Problem(400, f"the body is not a JSON object: {str(error)[:200]}") from None


def _text(name: Any) -> str | None:
    if not isinstance(name, str | None):
        raise Problem(400, f"model must be a text, not {str(name)[:40]!r}", "model")
    return name


def _status(model: HostedModel) -> dict[str, Any]:
    state: dict[str, Any] = {"value": "unloaded" if model.state == "unloading" else model.state}
    return state if model.problem is None else {**state, "failed": True, "error": model.problem}


def _described_adapter(model: HostedModel, adapter: str) -> dict[str, Any]:
    return {**entry(model.service, adapter), "status": _status(model)}


def _described(model: HostedModel) -> dict[str, Any]:
    hosted, known = model.hosted, model.client.model
    tasks = [] if not known else ["completion"] if known.get("generates") else []
    size, _, kind = str(known.get("parameters", "")).partition(", ")
    more = {
        "aliases": list(hosted.aliases),
        "status": _status(model),
        "capabilities": tasks + ["chat"] * bool(known.get("chats")) + ["embedding"] * ("pooling" in known),
        "parameters": size or None,
        "quantization": kind or None,
        "memory_bytes": model.needs,
        "pinned": hosted.pinned,
        "requests": model.users,
    }
    return {**status.describe(model.service), **more}


WATCHING_PATHS = (
    Path("/livez", status.alive),
    Path("/readyz", health),
)
PATHS = (
    *WATCHING_PATHS,
    Path("/health", health),
    Path("/ping", health, ("GET", "POST")),
    Path("/version", status.version),
    Path("/v1/machine", machine),
    Path("/v1/models", models),
    Path("/models/load", load, ("POST",)),
    Path("/models/unload", unload, ("POST",)),
    Path("/v1/models/{name:path}", model),
    Path("/api/version", ollama.version),
    Path("/api/tags", ollama_tags),
    Path("/api/ps", ollama_loaded),
    Path("/api/copy", model_changes.copy, ("POST",)),
    Path("/api/delete", model_changes.delete, ("DELETE",)),
    Path("/api/pull", model_changes.pull, ("POST",)),
)

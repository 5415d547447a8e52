"""Ollama's own API, for its clients and front ends. Errors on its paths have its format (`Problem.body_for`)."""

import hashlib
import math
import re
from typing import Any

from ckdist.serve.answer import NO_END, json_answer
from ckdist.serve.body import read_body
from ckdist.serve.encoding import to_json
from ckdist.serve.ollama_answer import OllamaAnswer, OllamaText, moment
from ckdist.serve.paths.path import Path, Request, Response, Service
from ckdist.serve.problems import Problem
from ckdist.serve.requests.json_body import parse_object
from ckdist.serve.requests.request_fields import Fields

VERSION = "0.12.6"  # of Ollama's API whose fields are read; clients ask for a least one
TAG = ":latest"
SHORT_BYTES = 64 << 10  # of a body that this process parses itself
FOREVER = "0001-01-01T00:00:00Z"  # the model stays loaded
# Durations: seconds as a number, or a text such as `5m` or `1h30m`. A negative one has no end.
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", re.ASCII)


async def version(service: Service, request: Request) -> Response:
    """The version of Ollama's API that is served."""
    return json_answer({"version": VERSION})


async def tags(service: Service, request: Request) -> Response:
    """The models that this server has."""
    return json_answer({"models": [entry(service)]})


async def loaded(service: Service, request: Request) -> Response:
    """The models that are loaded."""
    return json_answer({"models": [loaded_entry(service)] if service.state == "ready" else []})


async def show(service: Service, request: Request) -> Response:
    """Facts about a model: its template, its capabilities and its sizes."""
    service.check_ready()
    name = await _named_model(service, request)
    known, kind = service.known_model, service.known_model.get("architecture", "unknown")
    facts = await service.finished("tokenizer_facts", request, to_json({}))
    template = parse_object(b"".join(facts)).get("chat_template", "")
    info = {
        "general.architecture": kind,
        "general.basename": name,
        "general.parameter_count": known.get("num_parameters", 0),
        f"{kind}.context_length": known.get("context_length", 0),
        f"{kind}.vocab_size": known.get("vocab_size", 0),
    }
    shown = {"modelfile": f"FROM {name}\n", "parameters": "", "template": template, "license": ""}
    more = {"details": _details(service), "model_info": info, "capabilities": _abilities(template)}
    return json_answer({**shown, **more})


async def chat(service: Service, request: Request) -> Response:
    """The answer to a chat. A chat without messages only asks whether the model is loaded."""
    body, asked = await _question(service, request, "messages")
    if asked is not None:
        nothing = {"message": {"role": "assistant", "content": ""}, **_nothing(request, asked)}
        return json_answer({**_head(service), **nothing})
    return await service.answer(request, await service.prepare("ollama_chat", request, body), OllamaAnswer, NO_END)


async def generate(service: Service, request: Request) -> Response:
    """The continuation of a prompt. An empty prompt only asks whether the model is loaded."""
    body, asked = await _question(service, request, "prompt", "suffix", "images")
    if asked is not None:
        return json_answer({**_head(service), "response": "", **_nothing(request, asked)})
    prepared = await service.prepare("ollama_generate", request, body)
    return await service.answer(request, prepared, OllamaText, NO_END)


async def pull(service: Service, request: Request) -> Response:
    """Success for the model that this server has. Raises Problem 404 for others."""
    body = await _body(service, request)
    await _named_model(service, request, body)
    line = {"status": "success"}
    if body.get("stream", True) is False:
        return json_answer(line)
    return Response(to_json(line) + b"\n", media_type="application/x-ndjson")


async def delete(service: Service, request: Request) -> Response:
    """Raises Problem: clients cannot remove models."""
    name = await _named_model(service, request)
    raise Problem(403, f"{name!r} is served, and clients cannot remove it; a server with --models may allow that")


async def refuse(service: Service, request: Request) -> Response:
    """Raises Problem: models are made by `ckdist export` and named by `ckdist serve`."""
    why = "clients cannot make or push models, nor copy the only one; ckdist export makes them, and --alias names them"
    raise Problem(403, f"{request.url.path[:200]} is not supported: {why}")


async def _question(service: Service, request: Request, *names: str) -> tuple[bytes, dict[str, Any] | None]:
    """Returns the body, and its fields if it has none of `names`. A text worker parses a body that is not short."""
    service.check_ready()
    body = await read_body(request, service.settings.max_body) or b"{}"
    fields = parse_object(body) if len(body) <= SHORT_BYTES else None
    return body, None if fields is None or any(fields.get(name) for name in names) else fields


async def _body(service: Service, request: Request) -> dict[str, Any]:
    service.check_ready()
    return parse_object(await read_body(request, SHORT_BYTES) or b"{}")


async def _named_model(service: Service, request: Request, body: dict[str, Any] | None = None) -> str:
    """Returns the name of the model in the body. Raises Problem 404 if the server lacks it."""
    fields = Fields(await _body(service, request) if body is None else body)
    name, own = fields.text(("model", "name"), ""), service.settings.model_name
    if "ckdist.model" in request.scope:  # the router has found it, perhaps by an alias
        return own
    if name.removesuffix(TAG) != own.removesuffix(TAG):
        raise Problem(404, f"model {name[:200]!r} not found; this server has {own!r}", "model", "model_not_found")
    return own


def read_keep_alive(value: Any) -> float | None:
    """Returns the seconds of `keep_alive`; None: for ever. Raises Problem 400 if it is no duration."""
    text = str(value) if type(value) in (int, float) else value
    if isinstance(text, str) and re.fullmatch(rf"-?(?:{DURATION.pattern})+", text, re.ASCII):
        if text.startswith("-"):
            return None
        seconds = math.fsum(float(number) * UNITS[unit] for number, unit in DURATION.findall(text))
        if seconds < 1e9:
            return seconds
    raise Problem(400, f"keep_alive ({str(value)!r:.40}) must be seconds, or a text such as '5m' or '-1'", "keep_alive")


def _head(service: Service) -> dict[str, Any]:
    return {"model": service.settings.model_name, "created_at": moment()}


def _nothing(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the end of an answer to a request that only loads or unloads. Raises Problem 400 for the only model."""
    if "ckdist.keep_alive" in request.scope:
        return {"done": True, "done_reason": "load" if request.scope["ckdist.keep_alive"] != 0 else "unload"}
    if body.get("keep_alive") in (0, "0", "0s"):
        raise Problem(400, "keep_alive 0 cannot unload a model here; use POST /models/unload", "keep_alive")
    return {"done": True, "done_reason": "load"}


def loaded_entry(service: Service) -> dict[str, Any]:
    """Returns a model's entry in /api/ps."""
    more = {"expires_at": FOREVER, "size_vram": 0, "context_length": service.known_model.get("context_length", 0)}
    return {**entry(service), **more}


def entry(service: Service) -> dict[str, Any]:
    """Returns a model's entry in /api/tags."""
    name = service.settings.model_name
    digest = hashlib.sha256(service.source.fingerprint.encode()).hexdigest()
    size = service.known_model.get("size_bytes", 0)
    shown = {"name": name, "model": name, "modified_at": moment(), "size": size}
    return {**shown, "digest": digest, "details": _details(service)}


def _details(service: Service) -> dict[str, Any]:
    known = service.known_model
    kind, count = str(known.get("architecture", "unknown")), known.get("num_parameters", 0)
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    form = str(service.client.model.get("type", "unknown"))
    shared = {"parent_model": "", "format": "gguf", "family": kind, "families": [kind]}
    return {**shared, "parameter_size": size, "quantization_level": form}


def _abilities(template: str) -> list[str]:
    """Returns Ollama's words for completions, tools and thinking, as far as the template has them."""
    found = {"tools": "tools", "thinking": "think"}
    return ["completion", *(name for name, word in found.items() if word in template)]


PATHS = (
    Path("/api/version", version),
    Path("/api/tags", tags),
    Path("/api/ps", loaded),
    Path("/api/show", show, ("POST",)),
    Path("/api/chat", chat, ("POST",)),
    Path("/api/generate", generate, ("POST",)),
    Path("/api/pull", pull, ("POST",)),
    Path("/api/delete", delete, ("DELETE",)),
    *(Path(f"/api/{name}", refuse, ("POST",)) for name in ("create", "copy", "push")),
)

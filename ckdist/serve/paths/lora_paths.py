"""vLLM's and llama-server's paths for adapters that requests name."""

from pathlib import Path as Folder
from typing import Any

from starlette.responses import PlainTextResponse, Response

from ckdist.config.engine_config import ADAPTER_NAME
from ckdist.engine.messages import LoadAdapter, UnloadAdapter
from ckdist.serve.answer import json_answer
from ckdist.serve.body import read_body
from ckdist.serve.engine_client import new_id
from ckdist.serve.paths.path import Path, Request, Service
from ckdist.serve.problems import Problem
from ckdist.serve.requests.adapter_choice import chosen_adapters
from ckdist.serve.requests.json_body import parse_list, parse_object
from ckdist.serve.requests.request_fields import Fields


async def load(service: Service, request: Request) -> Response:
    """Loads a folder or file within --lora-dir: {"lora_name": ..., "lora_path": ..., "load_inplace": false}."""
    fields = await _fields(service, request)
    name, path = _needed(fields, "lora_name"), _needed(fields, "lora_path")
    _check_name(service, name)
    folder = _within(service.settings.lora_dir or "", path)
    await service.client.call(LoadAdapter(new_id(), name, folder, fields.switch("load_inplace")))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(service: Service, request: Request) -> Response:
    """Forgets an adapter: {"lora_name": ...}. Requests with it go on."""
    name = _needed(await _fields(service, request), "lora_name")
    await _unload(service, name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


async def uploads(service: Service, request: Request) -> Response:
    """The adapters that clients have uploaded, and the room for more."""
    from ckdist.serve import adapter_uploads

    return json_answer(adapter_uploads.room_of(service, request).described(service.adapters or {}))


async def upload(service: Service, request: Request) -> Response:
    """POST: keeps an adapter's files and loads it. DELETE: forgets it and removes its files."""
    from ckdist.serve import adapter_uploads

    room, name = adapter_uploads.room_of(service, request), request.path_params["name"]
    service.check_ready()
    _check_name(service, name)
    if request.method == "DELETE":
        if is_loaded := name in (service.adapters or {}):
            await _unload(service, name)
        room.remove(name, is_loaded)
        return json_answer({"id": name, "deleted": True})
    replaces = request.query_params.get("load_inplace", "").lower() in ("1", "true")
    async with room.receive(request, name, replaces) as path:
        await service.client.call(LoadAdapter(new_id(), name, path, replaces))
    return json_answer({"id": name, "lora_path": f"{adapter_uploads.FOLDER}/{name}"})


async def lora_adapters(service: Service, request: Request) -> Response:
    """The adapters. Scales are those of a request that names none."""
    if service.adapters is not None:
        scales = dict(service.adapters_of_all)
        named = service.adapters.items()
        return json_answer([{"id": number, "path": name, "scale": scales.get(name, 0.0)} for name, number in named])
    fixed = service.settings.adapter
    return json_answer([] if fixed is None else [{"id": 0, "path": fixed, "scale": 1.0}])


async def change_lora_adapters(service: Service, request: Request) -> Response:
    """Sets the scales of requests that name none: [{"id": 0, "scale": 0.5}]. Adapters not in the list have scale 0."""
    if service.settings.lora_dir is None and service.adapters is None:
        message = "no adapter has a scale that can be changed: start with --lora NAME=FOLDER and --lora-dir DIR"
        raise Problem(400, message, "scale", "unsupported_parameter")
    _check_allowed(service)
    items = parse_list(await read_body(request, service.settings.max_body))
    service.adapters_of_all = chosen_adapters(items, service.adapters or {})
    return json_answer({"success": True})


async def _unload(service: Service, name: str) -> None:
    await service.client.call(UnloadAdapter(new_id(), name))
    service.adapters_of_all = tuple(use for use in service.adapters_of_all if use[0] != name)


def _check_name(service: Service, name: str) -> None:
    if not ADAPTER_NAME.fullmatch(name):
        message = f"lora_name ({name[:100]!r}) must be at most 100 letters, digits, dots and dashes"
        raise Problem(400, message, "lora_name", "invalid_value")
    if name in (service.settings.model_name, *service.settings.aliases, *service.copies):
        raise Problem(400, f"lora_name ({name[:100]!r}) is the model's name", "lora_name", "invalid_value")


def _check_allowed(service: Service) -> None:
    service.check_ready()
    if service.settings.lora_dir is None:
        message = "adapters are loaded, unloaded and scaled only if the server was started with --lora-dir DIR"
        raise Problem(403, message, code="not_allowed")


async def _fields(service: Service, request: Request) -> Fields:
    _check_allowed(service)
    return Fields(parse_object(await read_body(request, service.settings.max_body)))


def _needed(fields: Fields, name: str) -> str:
    value = fields.text(name)
    if not value:
        raise Problem(400, f"{name} is needed", name, "missing_required_parameter")
    return value


def _within(root: str, path: str) -> str:
    """The folder or file that `path` names within `root`, without links. Raises Problem 400 if it is not there."""
    try:
        folder = (Folder(root) / path).resolve(strict=True)
        if folder.is_relative_to(Folder(root).resolve(strict=True)) and (folder.is_dir() or folder.is_file()):
            return str(folder)
    except (OSError, ValueError, RuntimeError):
        pass
    message = f"lora_path ({path[:200]!r}) is no folder or file within --lora-dir"
    raise Problem(400, message, "lora_path", "invalid_value")


def entry(service: Service, adapter: str) -> dict[str, Any]:
    """An adapter as OpenAI's model. `parent` is the model."""
    model = {"object": "model", "created": service.created, "owned_by": "ckdist"}
    return {"id": adapter, **model, "parent": service.settings.model_name, "root": adapter}


PATHS = (
    Path("/v1/load_lora_adapter", load, ("POST",)),
    Path("/v1/unload_lora_adapter", unload, ("POST",)),
    Path("/v1/lora_uploads", uploads),
    Path("/v1/lora_uploads/{name:path}", upload, ("POST", "DELETE")),
    Path("/lora-adapters", lora_adapters),
    Path("/lora-adapters", change_lora_adapters, ("POST",)),
)

"""OpenAI's list of models."""

from typing import Any

from ckdist.serve.answer import json_answer
from ckdist.serve.paths.lora_paths import entry
from ckdist.serve.paths.path import Path, Request, Response, Service
from ckdist.serve.problems import Problem


async def models(service: Service, request: Request) -> Response:
    """A list with the server's model and its adapters."""
    return json_answer({"object": "list", "data": _entries(service)})


async def model(service: Service, request: Request) -> Response:
    """The model of this name. Raises Problem 404 for other names."""
    name, models = request.path_params["name"], _entries(service)
    found = next((entry for entry in models if entry["id"] == name), None)
    if found is None:
        known = ", ".join(repr(entry["id"]) for entry in models)
        message = f"there is no model {name[:200]!r}; this server has {known}"
        raise Problem(404, message, "model", "model_not_found")
    return json_answer(found)


def describe(service: Service) -> dict[str, Any]:
    """Returns OpenAI's model object."""
    name, known = service.settings.model_name, service.known_model
    model = {"id": name, "object": "model", "created": service.created, "owned_by": "ckdist", "root": name}
    return {**model, "parent": None, "max_model_len": known.get("context_length"), "meta": known}


def _entries(service: Service) -> list[dict[str, Any]]:
    return [describe(service), *(entry(service, adapter) for adapter in service.adapters or ())]


PATHS = (
    Path("/v1/models", models),
    Path("/v1/models/{name:path}", model),
)

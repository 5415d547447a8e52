"""The server's state and its models, for load balancers, dashboards and clients."""

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from ckdist import __version__
from ckdist.serve.answer import NO_END, EventStream, json_answer
from ckdist.serve.paths.lora_paths import entry
from ckdist.serve.paths.path import Path, Request, Response, Service
from ckdist.serve.problems import Problem


async def health(service: Service, request: Request) -> Response:
    """200 if requests can be answered, else Problem 503."""
    service.check_ready()
    return json_answer({"status": "ok"})


async def alive(service: Service, request: Request) -> Response:
    """200 while this process answers, also while the model loads and while the server drains."""
    return json_answer({"status": "alive"})


async def metrics(service: Service, request: Request) -> Response:
    """The metrics in the Prometheus text format."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def machine(service: Service, request: Request) -> Response:
    """Server-sent events with the state of the machine, two per second: rank 0's counters, and of every rank its host,
    memory, measured bandwidth and counters.
    """
    settings = service.settings
    return EventStream(service.machine.events(), lambda: 0.0, settings.silence, settings.stall_timeout, NO_END)


async def version(service: Service, request: Request) -> Response:
    """This program's version."""
    return json_answer({"version": __version__})


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


WATCHING_PATHS = (
    Path("/livez", alive),
    Path("/readyz", health),
    Path("/metrics", metrics),
)
PATHS = (
    *WATCHING_PATHS,
    Path("/health", health),
    Path("/ping", health, ("GET", "POST")),
    Path("/v1/machine", machine),
    Path("/version", version),
    Path("/v1/models", models),
    Path("/v1/models/{name:path}", model),
)

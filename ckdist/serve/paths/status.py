"""The server's state, for load balancers, dashboards and clients."""

from prometheus_client import CONTENT_TYPE_LATEST

from ckdist import __version__
from ckdist.serve.answer import NO_END, EventStream, json_answer
from ckdist.serve.paths.path import Path, Request, Response, Service


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
)

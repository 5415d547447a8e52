"""How the server is: for load balancers, dashboards, and clients that look before they ask."""

from fastapi import Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from ckdist import __version__
from ckdist.serve.answer import json_answer
from ckdist.serve.paths.path import Path
from ckdist.serve.service import Service


async def health(service: Service, request: Request) -> Response:
    """200 once requests are answered, else Problem 503."""
    service.check_ready()
    return json_answer({"status": "ok"})


async def metrics(service: Service, request: Request) -> Response:
    """The numbers for Prometheus."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def version(service: Service, request: Request) -> Response:
    """This program's version."""
    return json_answer({"version": __version__})


PATHS = (
    Path("/health", health),
    Path("/ping", health, ("GET", "POST")),
    Path("/metrics", metrics),
    Path("/version", version),
)

"""The HTTP application: the table of paths, error answers, and access control."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ckdist.errors import CkdistError
from ckdist.serve.access import Access
from ckdist.serve.answer import CLIENT_GONE, ClientGone, problem_answer
from ckdist.serve.paths import (
    absent,
    conversations,
    file_batches,
    llama_server,
    lora_paths,
    message_batches,
    ollama,
    page,
    plain,
    slot_actions,
    status,
    stored_responses,
)
from ckdist.serve.paths.path import Path, PathNames
from ckdist.serve.problems import Problem
from ckdist.serve.request_log import note_problem
from ckdist.serve.service import Service

ROOMS = (
    status, plain, stored_responses, conversations, file_batches, message_batches, llama_server, ollama,
    slot_actions, lora_paths, absent,
)  # fmt: skip
PATHS = tuple(path for room in ROOMS for path in room.PATHS)
CODES = {404: "unknown_url", 405: "method_not_supported"}


def create_app(service: Service) -> Access:
    """Returns the ASGI application for `service`."""
    paths = PATHS if service.settings.no_webui else (*PATHS, *page.PATHS)
    names = PathNames(path.name for path in paths)
    return Access(_routed(service, paths), service.settings, service.accounts, service.metrics, names)


def create_watching_app(service: Service) -> Starlette:
    """Returns the ASGI application of the metrics port, which needs no key."""
    return _routed(service, status.WATCHING_PATHS)


def _routed(service: Service, paths: Iterable[Path]) -> Starlette:
    return application([Route(path.name, partial(path.handle, service), methods=list(path.methods)) for path in paths])


async def _refuse(request: Request, error: Exception) -> Response:
    """Answers an error: 500 if it is not in the tree of `ckdist.errors`."""
    return problem_answer(Problem.of(error), request.url.path)


async def _refuse_path(request: Request, error: HTTPException) -> Response:
    """Answers an unknown path or method."""
    message = f"{request.method} {request.url.path[:200]!r}: {error.detail}"
    problem = Problem(error.status_code, message, code=CODES.get(error.status_code))
    return problem_answer(problem, request.url.path, error.headers)


async def _nobody_listens(_request: Request, _error: Exception) -> Response:
    """Returns a status for the metrics, since the client is gone."""
    note_problem(CLIENT_GONE)
    return Response(status_code=499)


ERROR_ANSWERS: Mapping[Any, Any] = {
    CkdistError: _refuse, Exception: _refuse, HTTPException: _refuse_path,
    ClientGone: _nobody_listens, ClientDisconnect: _nobody_listens,
}  # fmt: skip


def application(routes: Sequence[BaseRoute]) -> Starlette:
    """Returns the application of these routes, with answers to errors."""
    app = Starlette(routes=routes, exception_handlers=ERROR_ANSWERS)
    app.router.redirect_slashes = False
    return app

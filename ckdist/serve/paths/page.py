"""The web page (`--no-webui` leaves it out), to which no key is asked: it holds no secret."""

from starlette.requests import Request
from starlette.responses import Response

from ckdist.serve.paths.path import Path
from ckdist.serve.problems import Problem
from ckdist.serve.service import Service
from ckdist.serve.static_files import INDEX, static_files


async def index(service: Service, request: Request) -> Response:
    """The page: a chat, and the machine beside it."""
    return static_files()[INDEX].answer(request.headers)


async def file(service: Service, request: Request) -> Response:
    """A script, a style or a picture of the page. Problem 404 for what it does not have."""
    name = request.path_params["name"]
    found = static_files().get(name)
    if found is None:
        raise Problem(404, f"the page has no file {name[:200]!r}", code="unknown_url")
    return found.answer(request.headers)


PATHS = (
    Path("/", index),
    Path("/page/{name:path}", file),
)

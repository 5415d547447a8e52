"""The web page. It needs no key, since it contains no secrets. `--no-webui` switches it off."""

from starlette.responses import RedirectResponse, Response

from ckdist.serve.paths.path import Path, Request, Service
from ckdist.serve.problems import Problem
from ckdist.serve.static_files import INDEX, static_files


async def index(service: Service, request: Request) -> Response:
    """The page: a chat, and a view of the machine. Its links are relative to a path that ends with a slash."""
    if not request.scope["raw_path"].endswith(b"/"):
        return RedirectResponse(f"{service.settings.api_prefix}/", 308)
    return static_files()[INDEX].answer(request.headers)


async def file(service: Service, request: Request) -> Response:
    """A script, a style or a picture of the page. Raises Problem 404 for unknown names."""
    name = request.path_params["name"]
    found = static_files().get(name)
    if found is None:
        raise Problem(404, f"the page has no file {name[:200]!r}", code="unknown_url")
    return found.answer(request.headers)


PATHS = (
    Path("/", index),
    Path("/page/{name:path}", file),
)

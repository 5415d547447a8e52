"""The web page, and its files in `ckdist/serve/page`. `--no-webui` switches it off.

The files contain no secrets, so they need no key. The data on the page comes from paths that need one. The files are
read once, and their headers forbid all other sources.
"""

import functools
import hashlib
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import RedirectResponse, Response

from ckdist.serve.paths.path import Path, Request, Service
from ckdist.serve.problems import Problem

FOLDER = pathlib.Path(__file__).parent.parent / "page"
INDEX = "index.html"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No inline code, no other sources, no frames. Scripts cannot turn text into HTML (trusted types).
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",  # browsers ask again each time, and mostly get a 304
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class StaticFile:
    """One file: its bytes, their media type and their digest."""

    body: bytes
    media_type: str
    etag: str

    def answer(self, headers: Mapping[str, str]) -> Response:
        """Returns the file, or 304 if the client has it. `headers` are the request's."""
        own = {**HEADERS, "ETag": self.etag}
        if headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=own)
        return Response(self.body, 200, own, self.media_type)


@functools.cache
def static_files() -> Mapping[str, StaticFile]:
    """Returns all files of the page by name. Raises OSError if they cannot be read."""
    files = {}
    for path in FOLDER.iterdir():
        if path.suffix in MEDIA_TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            files[path.name] = StaticFile(body, MEDIA_TYPES[path.suffix], etag)
    return files


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

"""Paths that clients know from other servers and that this one does not have: a 404 that says so, since clients retry a
501.
"""

from starlette.requests import Request
from starlette.responses import Response

from ckdist.serve.paths.path import Path
from ckdist.serve.problems import Problem
from ckdist.serve.service import Service

METHODS = ("GET", "POST", "PUT", "DELETE")
NAMES = {
    "/pooling": "use /v1/embeddings",
    "/classify": "texts are not classified",
    "/v1/responses/{name:path}": "answers are not kept",
    "/v1/batches": "send the requests one by one; they share steps",
    "/v1/batches/{name:path}": "send the requests one by one; they share steps",
    "/v1/files": "files are not kept",
    "/v1/files/{name:path}": "files are not kept",
    "/v1/audio/{name:path}": "only text is read and written",
    "/v1/images/{name:path}": "only text is read and written",
    "/v1/moderations": "texts are not judged",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/fine_tuning/{name:path}": "train with `ckdist train`",
    "/slots/{name:path}": "slots are not saved; prompts are found again by their beginnings",
    "/api/{name:path}": "Ollama's own API is not served; use /v1/chat/completions, which Ollama has too",
}


async def refuse(service: Service, request: Request) -> Response:
    """Raises Problem 404, which says what to use instead."""
    path = request.url.path[:200]
    reason = next((why for name, why in NAMES.items() if _matches(name, path)), "use /v1/chat/completions")
    raise Problem(404, f"{path!r} is not supported by this server: {reason}", code="unsupported_endpoint")


def _matches(name: str, path: str) -> bool:
    begin, brace, _ = name.partition("{")
    return path.startswith(begin) if brace else path == name


PATHS = tuple(Path(name, refuse, METHODS) for name in NAMES)

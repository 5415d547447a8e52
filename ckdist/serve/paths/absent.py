"""Paths of other servers that this one does not have. They are a 404 with the reason, since clients retry a 501."""

from ckdist.serve.paths.path import Path, Request, Response, Service
from ckdist.serve.problems import Problem

METHODS = ("GET", "POST", "PUT", "DELETE")
ONE_MODEL = "the server has one model for its whole life; start another server"
NAMES = {
    "/pooling": "use /v1/embeddings",
    "/classify": "classification is not supported",
    "/generate": "use /v1/completions",
    "/generate_stream": "use /v1/completions with stream",
    "/v1/complete": "use /v1/messages",
    "/v1/chat/completions/{name:path}": "answers are not kept",
    "/v1/uploads": "send the whole file to /v1/files",
    "/v1/uploads/{name:path}": "send the whole file to /v1/files",
    "/v1/vector_stores": "texts are not kept; use /v1/embeddings and /v1/rerank",
    "/v1/vector_stores/{name:path}": "texts are not kept; use /v1/embeddings and /v1/rerank",
    "/v1/containers": "no code is run here",
    "/v1/containers/{name:path}": "no code is run here",
    "/v1/audio/{name:path}": "only text is read and written",
    "/v1/images/{name:path}": "only text is read and written",
    "/v1/videos": "only text is read and written",
    "/v1/realtime": "use /v1/chat/completions with stream",
    "/v1/moderations": "moderation is not supported",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/fine_tuning/{name:path}": "train with `ckdist train`",
    "/models/load": ONE_MODEL,
    "/models/unload": ONE_MODEL,
    "/sleep": "the server does not sleep; end it with SIGTERM",
    "/wake_up": "the server does not sleep",
    "/is_sleeping": "the server does not sleep; use /health",
    "/reset_prefix_cache": "a restart empties the cache",
    "/api/{name:path}": "this part of Ollama's API is not served; chats, prompts and vectors are",
}


async def refuse(service: Service, request: Request) -> Response:
    """Raises Problem 404 with the path to use instead, or the reason."""
    path = request.url.path[:200]
    reason = next((why for name, why in NAMES.items() if _matches(name, path)), "use /v1/chat/completions")
    raise Problem(404, f"{path!r} is not supported by this server: {reason}", code="unsupported_endpoint")


def _matches(name: str, path: str) -> bool:
    begin, brace, _ = name.partition("{")
    return path.startswith(begin) if brace else path == name


PATHS = tuple(Path(name, refuse, METHODS) for name in NAMES)

"""The prefix cache: prompts that are computed ahead."""

from ckdist.serve.answer import json_answer
from ckdist.serve.paths.path import Path, Request, Response, Service


async def prefill(service: Service, request: Request) -> Response:
    """Computes the prompt of a later chat or completion and keeps it in the cache. The body is that request's."""
    return json_answer(await service.prefill(request, await service.prepare("prefill", request)))


PATHS = (Path("/v1/cache/prefill", prefill, ("POST",)),)

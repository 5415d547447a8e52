"""Anthropic's API. Errors on its paths have its format (`Problem.body_for`)."""

from ckdist.serve.answer import LongAnswer
from ckdist.serve.anthropic_answer import AnthropicAnswer
from ckdist.serve.paths.path import Path, Request, Response, Service

NO_END = b""  # these streams end with their last event


async def messages(service: Service, request: Request) -> Response:
    """The answer to a chat in Anthropic's format."""
    return await service.answer(request, await service.prepare("messages", request), AnthropicAnswer, NO_END)


async def count_tokens(service: Service, request: Request) -> Response:
    """The number of tokens in a chat."""
    return LongAnswer(await service.finished("count_tokens", request))


PATHS = (
    Path("/v1/messages", messages, ("POST",)),
    Path("/v1/messages/count_tokens", count_tokens, ("POST",)),
)

"""Anthropic's API."""

from fastapi import Request
from fastapi.responses import Response

from ckdist.serve.answer import PROBLEM_HEADERS, LongAnswer, json_answer
from ckdist.serve.anthropic_answer import AnthropicAnswer
from ckdist.serve.paths.path import Path
from ckdist.serve.problems import Problem
from ckdist.serve.service import Service

NO_END = b""  # these streams end with their last event


async def messages(service: Service, request: Request) -> Response:
    """The answer to a chat, as Anthropic has it."""
    try:
        return await service.answer(request, await service.prepare("messages", request), AnthropicAnswer, NO_END)
    except Problem as problem:
        return _refusal(problem)


async def count_tokens(service: Service, request: Request) -> Response:
    """How many tokens a chat has."""
    try:
        return LongAnswer(await service.finished("count_tokens", request))
    except Problem as problem:
        return _refusal(problem)


def _refusal(problem: Problem) -> Response:
    """A problem in Anthropic's shape, which is OpenAI's with one field more."""
    return json_answer({"type": "error", **problem.body()}, problem.status, PROBLEM_HEADERS.get(problem.status))


PATHS = (
    Path("/v1/messages", messages, ("POST",)),
    Path("/v1/messages/count_tokens", count_tokens, ("POST",)),
)

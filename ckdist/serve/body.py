"""Reads a request's body within limits of size and time."""

import asyncio

from starlette.requests import Request
from starlette.types import Message, Receive

from ckdist.serve.problems import Problem

READ_SECONDS = 60.0
# Bodies up to this multiple of the limit are read and dropped: many clients send all before they read an answer.
PATIENCE = 4


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the whole body. Raises Problem 408 if it arrives too slowly, and 413 if it is too large."""
    try:
        return await asyncio.wait_for(_collect(request, max_bytes), READ_SECONDS)
    except asyncio.TimeoutError:
        raise Problem(408, f"the body did not arrive within {READ_SECONDS:.0f} seconds") from None


async def _collect(request: Request, max_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > PATIENCE * max_bytes:
            break
        if size <= max_bytes:
            parts.append(part)
        else:
            parts.clear()
    if size > max_bytes:
        raise Problem(413, f"the body is larger than {max_bytes} bytes (--max-body); send less")
    return b"".join(parts)


def receive_again(body: bytes, receive: Receive) -> Receive:
    """Returns ASGI's receive for a request whose body was read."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        """Returns the body, then the messages that follow it."""
        return parts.pop() if parts else await receive()

    return next_message


async def receive_nothing() -> Message:
    """ASGI's receive of a client that sends nothing."""
    return await asyncio.Future()

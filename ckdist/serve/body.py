"""Reads a request's body within limits of size and time."""

import asyncio

from starlette.requests import Request

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

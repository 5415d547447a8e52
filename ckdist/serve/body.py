"""A request's body as bytes, read under a size and a time limit."""

import asyncio

from starlette.requests import Request

from ckdist.serve.problems import Problem

READ_SECONDS = 60.0
PATIENCE = 4  # so many times the limit is read and dropped, since many clients read no answer before they have sent all


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Problem 408 (too slow) or 413 (too large)."""
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

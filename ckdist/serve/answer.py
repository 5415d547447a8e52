"""Answers as ASGI responses: JSON, errors and event streams. Work ends if its client disconnects."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ckdist.serve.encoding import Turns, to_json, to_json_in_turns
from ckdist.serve.problems import ANTHROPIC, OLLAMA, Problem
from ckdist.serve.request_log import note_problem

CHECK_SECONDS = 1.0
PART_BYTES = 256 << 10
PROBLEM_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},  # the rest of the body is not read
    413: {"Connection": "close"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}
CLIENT_GONE = Problem(499, "the client has closed the connection", code="client_gone")
END_OF_STREAM = b"data: [DONE]\n\n"
NO_END = b""  # of streams that end with their last event
# What is sent on a stream without events, so that proxies do not close it.
KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
ANTHROPIC_PING = b'event: ping\ndata: {"type": "ping"}\n\n'

log = logging.getLogger(__name__)


Result = TypeVar("Result")


class ClientGone(Exception):  # noqa: N818 - it is no error
    """The client has closed its connection."""


def json_answer(
    content: dict[str, Any] | list[Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Returns `content` as JSON. The answer must be short, since it is encoded at once."""
    return Response(to_json(content), status, headers, "application/json")


class LongAnswer(Response):
    """JSON that may be long, given as bytes in one or more parts.

    It is sent in small parts, so that the event loop serves other clients in between.
    """

    def __init__(self, parts: Sequence[bytes]):
        self.parts = parts
        super().__init__(b"", 200, {"content-length": str(sum(map(len, parts)))}, "application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Sends the answer in parts of PART_BYTES."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        turns = Turns()
        for part in self.parts:
            for begin in range(0, len(part), PART_BYTES):
                await send({"type": "http.response.body", "body": part[begin : begin + PART_BYTES], "more_body": True})
                await turns.end()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def problem_answer(problem: Problem, path: str, more_headers: Mapping[str, str] | None = None) -> Response:
    """Returns the error answer to `problem`. Its format depends on the path, its headers depend on the status."""
    note_problem(problem)
    headers = {**PROBLEM_HEADERS.get(problem.status, {}), **(more_headers or {})}
    if problem.retry_after is not None:
        headers["Retry-After"] = str(problem.retry_after)
    return json_answer(problem.body_for(path), problem.status, headers)


def problem_event(problem: Problem, path: str) -> bytes:
    """Returns the error as the last event of a stream."""
    if path.startswith(OLLAMA):
        return to_json(problem.body_for(path)) + b"\n"
    form = named_event if path.startswith(ANTHROPIC) else event
    return form(problem.body_for(path))


def event(content: dict[str, Any]) -> bytes:
    """Returns one server-sent event."""
    return b"data: %b\n\n" % to_json(content)


def named_event(content: dict[str, Any]) -> bytes:
    """Returns one server-sent event whose name is the `type` of its content."""
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), to_json(content))


async def event_in_turns(content: dict[str, Any]) -> bytes:
    """Returns a server-sent event that may be long. The encoding yields to the event loop."""
    return b"data: %b\n\n" % await to_json_in_turns(content)


async def while_connected(
    receive: Receive, work: Awaitable[Result], progress_at: Callable[[], float], timeout: float
) -> Result:
    """Returns the result of `work`, and cancels it in case of an error.

    Args:
        receive: ASGI's receive, for the client's disconnect.
        work: The work.
        progress_at: Returns the time of the last progress, in seconds of time.monotonic, or raises a Problem.
        timeout: The limit in seconds without progress.

    Raises:
        ClientGone: The client went away.
        Problem: 504 after `timeout` seconds without progress.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        while True:
            await asyncio.wait((task, gone), timeout=min(CHECK_SECONDS, timeout), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise ClientGone
            if time.monotonic() - progress_at() > timeout:
                raise Problem(504, f"nothing has progressed for {timeout:g} seconds (--timeout)")
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # read it, so that asyncio does not report it as never retrieved


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of server-sent events, or of lines of JSON on Ollama's paths.

    A failure before the first event becomes an error answer with its own status. A later failure becomes the last
    event. While there are no events, signs of life are sent, which are no progress.

    Args:
        events: The events.
        progress_at: Returns the time of the work's last progress.
        timeout: The limit in seconds without progress.
        stall_timeout: The limit in seconds in which the client reads nothing.
        end: Sent after the last event: OpenAI's end mark, or nothing.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        progress_at: Callable[[], float],
        timeout: float,
        stall_timeout: float,
        end: bytes = END_OF_STREAM,
    ):
        self.events, self.progress_at, self.timeout, self.end = events, progress_at, timeout, end
        self.stall_timeout = stall_timeout
        self.background = None
        self._sent_at = 0.0  # time of the last event
        self._wrote_at = time.monotonic()  # time of the last event or sign of life
        self._waits_since: float | None = None  # while the client reads too slowly
        self._writing = asyncio.Lock()
        self._started = False
        self._kind = b"text/event-stream; charset=utf-8"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events, until the last one or until the client disconnects."""
        try:
            sign = ANTHROPIC_PING if scope["path"].startswith(ANTHROPIC) else KEEP_ALIVE
            if scope["path"].startswith(OLLAMA):
                sign, self._kind = b"", b"application/x-ndjson"
            await while_connected(receive, self._send_all(send, sign), self._progress, self.timeout)
        except ClientGone:
            note_problem(CLIENT_GONE)
        except Exception as error:
            problem = Problem.of(error)
            note_problem(problem)
            if problem.status == 500:
                log.error("a stream has failed", exc_info=error)
            if not self._started:
                await problem_answer(problem, scope["path"])(scope, receive, send)
            else:
                last = send({"type": "http.response.body", "body": problem_event(problem, scope["path"])})
                with suppress(asyncio.TimeoutError):  # do not wait for a client that does not read
                    await asyncio.wait_for(last, CHECK_SECONDS)

    def _progress(self) -> float:
        """Returns the time of the last progress. Raises Problem 408 if the client has read nothing for too long."""
        if self._waits_since is not None and time.monotonic() - self._waits_since > self.stall_timeout:
            raise Problem(408, f"the client has read nothing for {self.stall_timeout:g} seconds (--stall-timeout)")
        return max(self._sent_at, self.progress_at())

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        async with self._writing:
            self._waits_since = time.monotonic()
            if not self._started:
                self._started = True
                headers = [(b"content-type", self._kind), *HEADERS]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._wrote_at, self._waits_since = time.monotonic(), None

    async def _send_all(self, send: Send, sign: bytes) -> None:
        signs = asyncio.ensure_future(self._send_signs(send, sign))
        try:
            async with aclosing(self.events) as events:
                async for data in events:
                    await self._write(send, data)
                    self._sent_at = self._wrote_at
        finally:
            signs.cancel()
        await self._write(send, self.end, more=False)

    async def _send_signs(self, send: Send, sign: bytes) -> None:
        """Sends a sign of life whenever nothing was sent for KEEP_ALIVE_SECONDS. Lines of JSON have none."""
        while sign:
            idle = time.monotonic() - self._wrote_at
            if idle >= KEEP_ALIVE_SECONDS:
                await self._write(send, sign)
            else:
                await asyncio.sleep(KEEP_ALIVE_SECONDS - idle)


HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not buffer events
]

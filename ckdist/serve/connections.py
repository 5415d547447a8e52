"""The HTTP server's TCP connections: their number, and how long each may be silent.

A connection is silent if no request is under way on it: before its first request, while a head arrives, and between
requests. A new connection may replace the one that was silent the longest. Each connection is one asyncio protocol
around that of the HTTP library, which it calls only through asyncio's public callbacks.
"""

import asyncio
import errno
import logging
import math
import pathlib
import resource
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send

ACCEPTS = 64  # maximum in one turn of the event loop
OTHER_FILES = 64  # files other than connections that this process opens later: sockets of text workers, modules
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
COMPLAINT_SECONDS = 60.0  # between two log lines about a lack of files

log = logging.getLogger(__name__)

_current: ContextVar["Connection"] = ContextVar("connection")  # the connection of the running request


class Connection(asyncio.Protocol):
    """One TCP connection; `inner` is the HTTP library's protocol."""

    def __init__(self, pool: "ConnectionPool", inner: asyncio.Protocol):
        self.pool, self.inner = pool, inner
        self.transport: asyncio.Transport | None = None
        self.silent_since = 0.0
        self.requests = 0  # number of requests so far

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handles the opened connection."""
        self.transport = cast("asyncio.Transport", transport)  # true for every stream protocol
        self.inner.connection_made(transport)
        self.pool.add(self)

    def data_received(self, data: bytes) -> None:
        """Handles bytes from the client."""
        before = _current.set(self)  # a request's task starts in the call below, and inherits this
        try:
            self.inner.data_received(data)
        finally:
            _current.reset(before)

    def eof_received(self) -> bool | None:
        """Handles the end of the client's data. True keeps the connection open."""
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        """Handles a client that reads too slowly."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Handles a client that has caught up."""
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the closed connection."""
        self.pool.discard(self)
        self.inner.connection_lost(exc)

    def abort(self) -> None:
        """Closes the connection at once."""
        if self.transport is not None:
            self.transport.abort()


class ConnectionPool:
    """At most `places` connections. If there is one more, the one that was silent the longest is closed.

    Args:
        places: The maximum number of connections.
        first_seconds: The time until the head of a connection's first request must be complete.
        silent_seconds: The maximum time between two requests.
    """

    def __init__(self, places: int, first_seconds: float, silent_seconds: float):
        self.places, self.first_seconds, self.silent_seconds = places, first_seconds, silent_seconds
        self._silent: OrderedDict[Connection, None] = OrderedDict()  # the one that was silent the longest comes first
        self._busy: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._silent) + len(self._busy)

    @property
    def busy(self) -> int:
        """The number of connections with a request under way."""
        return len(self._busy)

    def protocol(self, inner: Callable[..., asyncio.Protocol]) -> Callable[..., Connection]:
        """Wraps `inner`, the HTTP library's protocol factory, with this pool's limits."""
        return lambda **arguments: Connection(self, inner(**arguments))

    def watched(self, app: ASGIApp) -> ASGIApp:
        """Wraps `app`. The connection of a request counts as busy until the request is answered."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            """Handles one request."""
            connection = _current.get()
            connection.requests += 1
            if connection in self._silent:
                del self._silent[connection]
                self._busy.add(connection)
            try:
                await app(scope, receive, send)
            finally:
                if connection in self._busy:
                    self._busy.remove(connection)
                    connection.silent_since = time.monotonic()
                    self._silent[connection] = None

        return serve

    def add(self, connection: Connection) -> None:
        """Adds a new connection. It is closed itself if all others have requests under way."""
        connection.silent_since = time.monotonic()
        self._silent[connection] = None
        if len(self) > self.places:
            longest, _ = self._silent.popitem(last=False)
            longest.abort()

    def discard(self, connection: Connection) -> None:
        """Removes a closed connection."""
        self._silent.pop(connection, None)
        self._busy.discard(connection)

    def close_silent(self) -> None:
        """Closes connections that have been silent for longer than allowed."""
        now, late = time.monotonic(), []
        for connection in self._silent:
            silent = now - connection.silent_since
            if silent > (self.silent_seconds if connection.requests else self.first_seconds):
                late.append(connection)
            elif silent < min(self.first_seconds, self.silent_seconds):
                break
        for connection in late:
            del self._silent[connection]
            connection.abort()


def room_for(places: int) -> tuple[int, int]:
    """Returns the number of connections at once, and the number accepted in one turn of the event loop.

    There are fewer than `places` if the limit on open files is too low.
    It raises this process's limit on open files as far as this user may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    accepts = min(ACCEPTS, limit // 16)
    # A connection that is closed to make room stays open until the turn of the event loop ends.
    others = sum(1 for _ in pathlib.Path("/proc/self/fd").iterdir()) + OTHER_FILES + 2 * accepts
    allowed = min(places + others, limit)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, min(places, allowed - others)), accepts


class OutOfFiles:
    """An asyncio exception handler that logs a lack of file descriptors at most once a minute.

    asyncio accepts connections again a second later.
    """

    def __init__(self) -> None:
        self._said = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles an error that asyncio could not raise in a task."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in OUT_OF_FILES):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._said > COMPLAINT_SECONDS:
            self._said = time.monotonic()
            log.error("no connections are accepted for a second: %s; raise the limit with ulimit -n", error.strerror)

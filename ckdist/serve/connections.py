"""The HTTP server's TCP connections: how many there may be, how long each may be silent, and which makes room.

A connection is silent while no request is under way on it: before its first request, while a head arrives, and between
requests. Each is one asyncio protocol around the HTTP library's own, which hears of bytes through asyncio's public
callbacks alone.
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
from dataclasses import dataclass
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send

ACCEPTS = 64  # in one turn of the event loop, at most
OTHER_FILES = 64  # that this process opens later and are no connections: sockets of text workers, modules
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
COMPLAINT_SECONDS = 60.0  # between two lines about a lack of files

log = logging.getLogger(__name__)

_current: ContextVar["Connection"] = ContextVar("connection")  # on which the running request came


class Connection(asyncio.Protocol):
    """One TCP connection; `inner` is the HTTP library's protocol."""

    def __init__(self, pool: "ConnectionPool", inner: asyncio.Protocol):
        self.pool, self.inner = pool, inner
        self.transport: asyncio.Transport | None = None
        self.silent_since = 0.0
        self.requests = 0  # that have come on it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self.transport = cast("asyncio.Transport", transport)  # as every stream protocol's is
        self.inner.connection_made(transport)
        self.pool.add(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of the client's."""
        before = _current.set(self)  # a request's task starts in here, and inherits it
        try:
            self.inner.data_received(data)
        finally:
            _current.reset(before)

    def eof_received(self) -> bool | None:
        """The client sends no more; True keeps the connection open."""
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.pool.discard(self)
        self.inner.connection_lost(exc)

    def abort(self) -> None:
        """Closes the connection at once."""
        if self.transport is not None:
            self.transport.abort()


class ConnectionPool:
    """At most `places` connections. When one more comes, the one that has been silent the longest is closed."""

    def __init__(self, places: int, first_seconds: float, silent_seconds: float):
        """`first_seconds`: until the head of a connection's first request is there; `silent_seconds`: between two
        requests.
        """
        self.places, self.first_seconds, self.silent_seconds = places, first_seconds, silent_seconds
        self._silent: OrderedDict[Connection, None] = OrderedDict()  # the longest silent one first
        self._busy: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._silent) + len(self._busy)

    @property
    def busy(self) -> int:
        """Connections with a request under way."""
        return len(self._busy)

    def protocol(self, inner: Callable[..., asyncio.Protocol]) -> Callable[..., Connection]:
        """What makes a connection's protocol, from what makes the HTTP library's."""
        return lambda **arguments: Connection(self, inner(**arguments))

    def watched(self, app: ASGIApp) -> ASGIApp:
        """`app`, with each request's connection marked as not silent until the request is answered."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            """One request of `app`'s."""
            connection = _current.get()
            self._begin(connection)
            try:
                await app(scope, receive, send)
            finally:
                self._end(connection)

        return serve

    def add(self, connection: Connection) -> None:
        """Takes a new connection in; it is closed itself where requests are under way on all others."""
        connection.silent_since = time.monotonic()
        self._silent[connection] = None
        if len(self) > self.places:
            longest, _ = self._silent.popitem(last=False)
            longest.abort()

    def discard(self, connection: Connection) -> None:
        """Forgets a connection that is gone."""
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

    def _begin(self, connection: Connection) -> None:
        connection.requests += 1
        if connection in self._silent:
            del self._silent[connection]
            self._busy.add(connection)

    def _end(self, connection: Connection) -> None:
        if connection in self._busy:
            self._busy.remove(connection)
            connection.silent_since = time.monotonic()
            self._silent[connection] = None


@dataclass(frozen=True)
class Room:
    """How many connections there may be, and how many of them are accepted in one turn of the event loop."""

    places: int
    accepts: int


def room_for(places: int) -> Room:
    """Room for `places` connections, or fewer if the limit of open files has no room for as many.

    The limit is raised as far as this user may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    accepts = min(ACCEPTS, limit // 16)
    # What is closed to make room stays open until the turn of the event loop ends.
    others = sum(1 for _ in pathlib.Path("/proc/self/fd").iterdir()) + OTHER_FILES + 2 * accepts
    allowed = min(places + others, limit)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return Room(max(1, min(places, allowed - others)), accepts)


class OutOfFiles:
    """An asyncio exception handler: a lack of files is one line a minute. asyncio accepts again a second later."""

    def __init__(self) -> None:
        self._said = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Reports what asyncio could not raise anywhere."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in OUT_OF_FILES):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._said > COMPLAINT_SECONDS:
            self._said = time.monotonic()
            log.error("no connections are accepted for a second: %s; raise the limit with ulimit -n", error.strerror)

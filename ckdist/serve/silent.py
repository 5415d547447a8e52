"""Connections on which no request is under way: who sends none, or never ends its head, is let go, so that such clients cannot take up all places."""

import time


class SilentConnections:
    """Looks at uvicorn's connections now and then; a request's body and answer have limits of their own."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._since = {}  # connection: the last request that it had when it was seen silent, and when that was first

    def close(self, connections, now: float | None = None) -> None:
        """Closes those of `connections` that have been silent for longer than allowed."""
        now = time.monotonic() if now is None else now
        seen = {}
        for connection in connections:
            request = connection.cycle
            if request is not None and not request.response_complete:
                continue
            last, since = self._since.get(connection, (request, now))
            seen[connection] = (request, since if last is request else now)
            if now - seen[connection][1] > self.seconds:
                connection.transport.close()
        self._since = seen

"""The outermost layer of the HTTP application: who may come in, and what came of each request in the metrics."""

import hmac
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckdist.serve.answer import problem_answer
from ckdist.serve.metrics import Metrics
from ckdist.serve.paths.path import PathNames
from ckdist.serve.problems import Problem

OPEN_PATHS = ("/health", "/ping")


class Access:
    """Answers 401 where a key is needed and missing or wrong; passes everything else on to `app`."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], metrics: Metrics, names: PathNames):
        """`names` are those that the metrics tell apart; all others count as one, so that a stranger cannot fill
        memory with names."""
        self.app, self.metrics, self.names = app, metrics, names
        self.keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.monotonic(), 499  # when nothing is sent, the client went away

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        known, path = self.names.resolve(scope["path"]) or (scope["path"], "other")
        scope = {**scope, "path": known}
        try:
            if self.keys and path not in OPEN_PATHS and not self._holds_key(scope):
                await problem_answer(Problem(401, "a valid API key is needed: send 'Authorization: Bearer KEY'", code="invalid_api_key"))(scope, receive, watch)
            else:
                await self.app(scope, receive, watch)
        finally:
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.request_seconds.labels(path).observe(time.monotonic() - begun)

    def _holds_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        # Every key is compared, and each in constant time, so that the time taken tells nothing about any of them.
        matches = [hmac.compare_digest(key.strip(), known) for known in self.keys]
        return kind.lower() == b"bearer" and any(matches)

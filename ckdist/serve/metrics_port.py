"""A separate port for metrics and probes, which needs no API key."""

from starlette.types import ASGIApp, Receive, Scope, Send


class MetricsPort:
    """Passes requests on `port` to `watching`, and all others to `app`."""

    def __init__(self, app: ASGIApp, watching: ASGIApp, port: int):
        self.app, self.watching, self.port = app, watching, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one HTTP request of ASGI."""
        app = self.watching if scope["server"][1] == self.port else self.app
        await app(scope, receive, send)

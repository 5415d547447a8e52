"""A port for those who watch the server: metrics and probes without an API key, and nothing else."""

from starlette.types import ASGIApp, Receive, Scope, Send


class MetricsPort:
    """Passes requests that came to `port` on to `watching`, all others to `app`."""

    def __init__(self, app: ASGIApp, watching: ASGIApp, port: int):
        self.app, self.watching, self.port = app, watching, port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request, as ASGI has it."""
        app = self.watching if scope["server"][1] == self.port else self.app
        await app(scope, receive, send)

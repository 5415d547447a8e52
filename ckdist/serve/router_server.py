"""The HTTP process of a server with several models. It is the parent of their engines, and outlives each of them."""

import asyncio
import gc
import logging
import socket
import time

from ckdist.errors import UserError
from ckdist.serve.batch_runner import open_batches
from ckdist.serve.heartbeat import send_heartbeats
from ckdist.serve.model_router import ModelRouter
from ckdist.serve.router_app import create_router_app, create_router_watching_app
from ckdist.serve.router_metrics import RouterMetrics
from ckdist.serve.server import WATCH_SECONDS, ServerLoop
from ckdist.serve.settings import USER_ERROR, HttpSettings

log = logging.getLogger("ckdist.serve")


class RouterServer(ServerLoop):
    """One HTTP process. `run` returns its exit code: 0 after draining, 1 if the command that started it has ended."""

    def __init__(self, settings: HttpSettings, listener: socket.socket) -> None:
        self.router = ModelRouter(settings)
        metrics = RouterMetrics(self.router)
        access, watching = create_router_app(self.router, metrics), create_router_watching_app(self.router, metrics)
        super().__init__(settings, listener, access, watching)

    async def run(self) -> int:
        """Serves until there is a reason to end. Returns the exit code."""
        self._handle_signals(lambda: None)
        try:
            batches = open_batches(self.router, self._app, self.settings)
        except UserError as error:
            log.error("%s", error)
            return USER_ERROR
        for model in self.router.models.values():
            model.service.batches = batches
        beating = asyncio.create_task(send_heartbeats(self.settings.heartbeat, lambda: True))
        answering = asyncio.create_task(self.uvicorn.serve(self.listeners))
        self.router.start()
        gc.collect()
        gc.freeze()
        try:
            while not self.signals and self._has_parent:
                self.connections.close_silent()
                await asyncio.sleep(WATCH_SECONDS)
            if self._has_parent:
                await self._drain()
            if batches is not None:
                await batches.close()
            await self.router.close()
            self.uvicorn.should_exit = True
            await answering
            return 0 if self._has_parent else 1
        finally:
            beating.cancel()
            self.router.end_now()
            if self.traces is not None:
                self.traces.close()

    async def _drain(self) -> None:
        """Refuses new requests, and waits for the running ones, at most `drain_timeout` seconds."""
        router = self.router
        log.info("draining: new requests are refused, %d sequences may finish", router.active)
        router.draining = True
        for model in router.models.values():
            model.service.draining = True
        end = time.monotonic() + self.settings.drain_timeout
        is_needed = lambda: (router.active or self.connections.busy) and self.signals < 2
        while is_needed() and time.monotonic() < end:  # noqa: ASYNC110 - it has a time limit
            await asyncio.sleep(WATCH_SECONDS / 4)
        if router.active:
            log.warning("%d sequences did not finish in time, and end early", router.active)
            for model in router.models.values():
                model.client.end_early("the server is shutting down")
            await asyncio.sleep(WATCH_SECONDS)

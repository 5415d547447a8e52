"""The HTTP process of a server with several models. It is the parent of their engines, and outlives each of them."""

import asyncio
import gc
import logging
import os
import signal
import socket
import time

from starlette.types import ASGIApp

from ckdist.errors import UserError
from ckdist.serve.batch_runner import open_batches
from ckdist.serve.heartbeat import Heartbeat
from ckdist.serve.metrics_port import MetricsPort
from ckdist.serve.model_router import ModelRouter
from ckdist.serve.router_app import create_router_app, create_router_watching_app
from ckdist.serve.router_metrics import RouterMetrics
from ckdist.serve.server import WATCH_SECONDS, uvicorn_for
from ckdist.serve.settings import USER_ERROR, HttpSettings
from ckdist.serve.traces import Traces

log = logging.getLogger("ckdist.serve")


class RouterServer:
    """One HTTP process. `run` returns its exit code: 0 after draining, 1 if the command that started it has ended."""

    def __init__(self, settings: HttpSettings, listener: socket.socket) -> None:
        self.settings, self.listeners = (
            settings,
            [listener, *(socket.socket(fileno=number) for number in settings.more_listeners)],
        )
        self.router = ModelRouter(settings)
        metrics = RouterMetrics(self.router)
        access = create_router_app(self.router, metrics)
        self._app = access.app
        endpoint = settings.traces_endpoint
        self.traces = access.traces = None if endpoint is None else Traces(endpoint, "")
        app: ASGIApp = access
        if settings.metrics_listener >= 0:
            self.listeners.append(socket.socket(fileno=settings.metrics_listener))
            watching = create_router_watching_app(self.router, metrics)
            app = MetricsPort(app, watching, self.listeners[-1].getsockname()[1])
        self.connections, self.uvicorn = uvicorn_for(app, settings)
        self.signals = 0

    async def run(self) -> int:
        """Serves until there is a reason to end. Returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._count_signal)
        loop.add_signal_handler(signal.SIGHUP, self._read_keys_again)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # it was blocked until there is a handler
        try:
            batches = open_batches(self.router, self._app, self.settings)
        except UserError as error:
            log.error("%s", error)
            return USER_ERROR
        for model in self.router.models.values():
            model.service.batches = batches
        beating = asyncio.create_task(Heartbeat(self.settings.heartbeat, lambda: True).run())
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

    @property
    def _has_parent(self) -> bool:
        return os.getppid() == self.settings.parent

    def _count_signal(self) -> None:
        self.signals += 1

    def _read_keys_again(self) -> None:
        settings = self.settings.with_current_keys()
        if settings is not self.settings:
            self.settings = settings
            self.router.accounts.replace((*settings.api_keys, *settings.file_keys))
            log.warning("the API keys were read again: %d in %s", len(settings.file_keys), settings.api_key_file)

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

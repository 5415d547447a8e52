"""The HTTP process's main loop: it loads the tokenizer, answers, drains on a signal, and ends soon after rank 0.

uvicorn handles the connections. Signals, draining and the watch over rank 0 are here: uvicorn would close its sockets
at the first signal, and new clients would get no answer.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ckdist.errors import CkdistError, UserError
from ckdist.serve.access import Access
from ckdist.serve.app import create_app, create_watching_app
from ckdist.serve.batch_runner import open_batches
from ckdist.serve.connections import ConnectionPool, OutOfFiles, room_for
from ckdist.serve.engine_client import EngineClient
from ckdist.serve.heartbeat import send_heartbeats
from ckdist.serve.prefill_file import prefill_all
from ckdist.serve.resuming_client import ResumingClient
from ckdist.serve.service import Service
from ckdist.serve.settings import BACKLOG, ENDED_SIGNAL, STALE_SIGNAL, USER_ERROR, HttpSettings
from ckdist.serve.traces import Traces
from ckdist.tokens.vocabulary import Vocabulary

WATCH_SECONDS = 0.1
SHUTDOWN_SECONDS = 2
HANDSHAKE_SECONDS = 5.0  # of TLS; `ConnectionPool` does not count connections before its end
MAX_HEADER_BYTES = 32 << 10
SILENT_CONNECTIONS = 4096  # in addition to those with requests under way

log = logging.getLogger("ckdist.serve")


class Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, and with a longer queue of connections than it accepts in one turn."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `HttpServer`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens with a queue of BACKLOG connections. Unix sockets have no TLS."""
        config, loop = self.config, asyncio.get_running_loop()
        protocol = partial(
            config.http_protocol_class, config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        self.servers = list[asyncio.Server]()
        for listener in sockets or ():
            tls = None if listener.family == socket.AF_UNIX else config.ssl
            seconds = None if tls is None else HANDSHAKE_SECONDS
            self.servers.append(
                await loop.create_server(
                    protocol, sock=listener, ssl=tls, ssl_handshake_timeout=seconds, backlog=config.backlog
                )
            )
            listener.listen(BACKLOG)
        self.started = True


def uvicorn_for(app: ASGIApp, settings: HttpSettings) -> tuple[ConnectionPool, Uvicorn]:
    """Returns uvicorn for `app`, and the pool of its connections."""
    places, accepts = room_for(settings.max_requests + SILENT_CONNECTIONS)
    connections = ConnectionPool(places, settings.first_request, settings.silence)
    config = uvicorn.Config(
        connections.watched(app),
        loop="asyncio",
        # uvicorn only calls this, so a function is as good as a class.
        http=cast("type[asyncio.Protocol]", connections.protocol(H11Protocol)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=accepts,
        timeout_keep_alive=cast("int", settings.silence),  # it goes to call_later, which takes fractions
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    return connections, Uvicorn(config)


class ServerLoop:
    """The part that servers of one model and of several share: sockets, signals, keys and traces.

    `run` of a subclass returns the exit code of the process.
    """

    def __init__(self, settings: HttpSettings, listener: socket.socket, access: Access, watching: ASGIApp):
        """`watching` answers on the metrics port, which needs no key."""
        numbers = (*settings.more_listeners, *filter(lambda number: number >= 0, [settings.metrics_listener]))
        self.listeners = [listener, *(socket.socket(fileno=number) for number in numbers)]
        self.settings, self._accounts, self._app = settings, access.accounts, access.app
        endpoint = settings.otlp_traces_endpoint
        self.traces = access.traces = None if endpoint is None else Traces(endpoint, settings.model_name)
        port = self.listeners[-1].getsockname()[1]

        async def by_port(scope: Scope, receive: Receive, send: Send) -> None:
            """Passes requests on the metrics port to `watching`, and all others to `access`."""
            await (watching if scope["server"][1] == port else access)(scope, receive, send)

        self.signals = 0
        self.connections, self.uvicorn = uvicorn_for(by_port if settings.metrics_listener >= 0 else access, settings)

    @property
    def _has_parent(self) -> bool:
        return os.getppid() == self.settings.parent

    def _handle_signals(self, on_ended: Callable[[], None]) -> None:
        """Installs the handlers of signals and of errors. `on_ended`: for ENDED_SIGNAL."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(OutOfFiles())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._count_signal)
        loop.add_signal_handler(signal.SIGHUP, self._read_keys_again)
        loop.add_signal_handler(ENDED_SIGNAL, on_ended)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, ENDED_SIGNAL})  # this process was started so

    def _count_signal(self) -> None:
        self.signals += 1

    def _read_keys_again(self) -> None:
        settings = self.settings.with_current_keys()
        if settings is not self.settings:
            self.settings = settings
            self._accounts.replace((*settings.api_keys, *settings.file_keys))
            log.warning("the API keys were read again: %d in %s", len(settings.file_keys), settings.api_key_file)


class HttpServer(ServerLoop):
    """The HTTP process of one model.

    `run` returns its exit code: 0 after draining, 1 if rank 0 was lost or the tokenizer does not load.
    """

    def __init__(self, settings: HttpSettings, listener: socket.socket):
        self.client = ResumingClient(settings.endpoint) if settings.restarts else EngineClient(settings.endpoint)
        self.service = Service(settings, self.client)
        super().__init__(settings, listener, create_app(self.service), create_watching_app(self.service))
        self._is_stuck = False  # the engine is, and will be ended

    async def run(self) -> int:
        """Serves until there is a reason to end. Returns the exit code."""
        self._handle_signals(self._meet_next_engine)
        self.client.start()
        try:
            batches = self.service.batches = open_batches(self.service, self._app, self.settings)
        except UserError as error:
            return await self._give_up(str(error), USER_ERROR)
        beating = asyncio.create_task(send_heartbeats(self.settings.heartbeat, lambda: self.service.has_started))
        answering = asyncio.create_task(self.uvicorn.serve(self.listeners))
        try:
            code = await self._watch(self._load())
            self.uvicorn.should_exit = True
            await answering
            return code
        finally:
            beating.cancel()
            if batches is not None:
                await batches.close()
            self.service.text.close()
            self.client.close()
            if self.traces is not None:
                self.traces.close()

    def _meet_next_engine(self) -> None:
        """Continues all requests on the next engine, which listens at the same address."""
        if isinstance(self.client, ResumingClient):
            self._is_stuck = False
            self.client.count_crash()
            self.client.disconnect()
            self.client.connect(self.settings.endpoint)

    def _load(self) -> asyncio.Task[Vocabulary]:
        """Begins to load the tokenizer."""
        task = asyncio.create_task(self.service.text.start())
        # Nobody looks at its error if the server is drained before. It would then be printed with a traceback.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    async def _watch(self, begun: asyncio.Task[Vocabulary]) -> int:
        """Watches the tokenizer, rank 0 and signals. Returns the exit code. `begun` loads the tokenizer."""
        loading: asyncio.Task[Vocabulary] | None = begun
        prefill: asyncio.Task[None] | None = None
        while True:
            if loading is not None and loading.done():
                if (error := loading.exception()) is not None:
                    return await self._give_up(f"the tokenizer does not load: {_reason(error)}")
                self.service.tokenizer, loading = loading.result(), None
                gc.collect()
                gc.freeze()  # later collections skip permanent objects: each stops the event loop
            if loading is None and self.service.text.ended:
                log.error("the tokenizer's process has ended; it is restarted")
                self.service.tokenizer, loading = None, self._load()
            if prefill is None and self.service.prefilling and self.service.has_started:
                prefill = asyncio.create_task(prefill_all(self.service, self.settings.prefill_file or ""))
            if prefill is not None and prefill.done():
                if (error := prefill.exception()) is not None:
                    return await self._give_up(_reason(error), USER_ERROR if isinstance(error, UserError) else 1)
                self.service.prefilling, prefill = False, None
            self.connections.close_silent()
            if self.settings.restarts and not self._is_stuck and self.client.state == "stale":
                self._is_stuck = True
                os.kill(self.settings.parent, STALE_SIGNAL)
            if not self._has_parent:
                return await self._outlive_rank_0()
            if self.signals or self.client.state == "draining":
                if prefill is not None:
                    prefill.cancel()
                return await self._drain()
            await asyncio.sleep(WATCH_SECONDS)

    async def _drain(self) -> int:
        within = f"within {self.settings.drain_timeout:g} seconds"
        log.info("draining: new requests are refused, %d sequences may finish %s", self.client.active, within)
        self.service.draining = True
        self.client.drain()
        end = time.monotonic() + self.settings.drain_timeout
        while self.client.active or self.connections.busy:
            if time.monotonic() > end or self.signals > 1:
                log.warning("%d sequences did not finish in time, and end early", self.client.active)
                self.client.end_early("the server is shutting down")
                await asyncio.sleep(WATCH_SECONDS)
                self.client.lose("the server is shutting down")
                return 0
            if not self._has_parent:
                return await self._outlive_rank_0()
            await asyncio.sleep(WATCH_SECONDS / 4)
        return 0

    async def _outlive_rank_0(self) -> int:
        if self.settings.log >= 0:
            os.dup2(self.settings.log, 2)  # rank 0, which copied this process's output, is gone
        return await self._give_up("rank 0 has ended; the server is going down")

    async def _give_up(self, reason: str, code: int = 1) -> int:
        """Answers 503 with the reason for `linger` seconds, so that clients that retry at once see it.

        Returns the exit code.
        """
        log.error("%s", reason)
        self.client.lose(reason)
        end = time.monotonic() + self.settings.linger
        while time.monotonic() < end and not self.signals:  # noqa: ASYNC110 - it has a time limit
            await asyncio.sleep(WATCH_SECONDS)
        return code


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CkdistError) else f"{type(error).__name__}: {error}"

"""Rank 0's loop: receives requests from the HTTP process over a socket, runs steps of the engine, sends tokens back.

`messages.py` defines the messages.

The socket is in a private directory of one user. No message can stop the loop, only a drain or a broken engine can.
While the engine has work, the loop reads the socket between steps. Otherwise it sleeps on the socket.
"""

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import zmq

from ckdist.engine import messages
from ckdist.engine.engine import Engine
from ckdist.engine.messages import MAX_MESSAGE_BYTES, TO_RANK_0, WATCH_SECONDS, Embed, Submit, Tokens, encode
from ckdist.engine.output import Output
from ckdist.engine.rank_reports import RankReports
from ckdist.engine.scheduler import EngineBusy
from ckdist.engine.socket_directory import socket_address
from ckdist.errors import CkdistError, CommError, ConfigError, EngineError, RequestError, UnknownAdapterError, UserError
from ckdist.native import lib

log = logging.getLogger(__name__)

HTTP_ROUTING_ID = b"http"  # the HTTP process's name on the socket; it gets the status before its first message
BEAT_SECONDS = 0.5  # between two status messages
STORING_SECONDS = 0.01  # between two looks at the blocks that go to disk, while no request runs
EARLY_END_SECONDS = 2.0  # after the limit of a drain, for the HTTP process to end requests with the tokens so far
MAX_PEERS = 64
MESSAGES_PER_STEP = 64  # so that a flood of messages does not stop the running sequences
MAX_UNSENT = 100_000  # messages to a peer that does not read
MAX_SOCKET_PATH = 107  # bytes, sun_path of unix(7)


class Coordinator:
    """Answers messages once it is constructed. Accepts requests once `begin` has set an engine.

    A second thread uses the socket while the caller cannot. It answers while the model loads. It sends the status
    during a long step, until that has lasted `step_limit` seconds. The socket belongs to the thread that holds the
    lock.

    Args:
        directory: An existing directory that is the user's own and closed to others.
        model: Sent with every status. `begin` adds vocab_size and context_length.
        step_limit: Seconds of one step that packs no weights, after which no status is sent.
        drain_seconds: Seconds that a drain waits for running requests.
        turns: Held during each step, if engines share the cores.

    Raises:
        ConfigError: The directory cannot be used.
    """

    def __init__(
        self, directory: str, model: dict[str, Any], *, step_limit: float = 120.0, drain_seconds: float = 60.0,
        turns: AbstractContextManager[None] | None = None,
    ) -> None:  # fmt: skip
        self.address = socket_address(directory)
        _check_directory(directory)
        self.state, self.error = "loading", None
        self._model, self._step_limit, self._drain_seconds = model, step_limit, drain_seconds
        self._turns = nullcontext() if turns is None else turns
        self._engine: Engine | None = None
        self._ranks: RankReports | None = None
        self._adapter_load: tuple[bytes, str] | None = None  # the peer that asked, and the peer's id of it
        self._watched_until = 0.0
        self._last_report = 0.0
        self._peers: set[bytes] = set()
        self._drain_requested = False
        self._drain_end = float("inf")
        self._last_beat = 0.0
        self._step_begin: float | None = None
        self._packed, self._packed_at = 0.0, 0.0  # bytes of weights, and when that number was last another one
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # sending to a peer that is gone or does not read raises an error
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted HTTP process takes over its name
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=self._speak, name="engine-status", daemon=True)
        self._thread.start()

    def request_drain(self) -> None:
        """Drains: accepted requests finish, new ones are refused, then `run` returns. Safe in a signal handler."""
        self._drain_requested = True

    def begin(self, engine: Engine, ranks: RankReports | None = None, facts: Mapping[str, Any] | None = None) -> None:
        """Sets the engine and sends every peer the state "ready". Requests wait for `run`.

        Args:
            engine: The engine of rank 0.
            ranks: Reports of every rank, sent while a client watches.
            facts: Further facts of the model for the status.
        """
        with self._lock:
            self._engine, self._ranks = engine, ranks
            sizes = {"vocab_size": engine.vocab_size, "context_length": engine.max_positions}
            self._model = {**self._model, **(facts or {}), **sizes}
            self._enter("ready")

    def run(self, check_peers: Callable[[], None] | None = None) -> None:
        """Serves from `begin` until drained. Before it raises, every client has received an error message.

        Args:
            check_peers: Called while idle. Raises if another rank is lost.

        Raises:
            EngineError: A rank is lost, or the engine broke.
            ModelFileError: Weights cannot be read any more.
        """
        engine = self._engine
        assert engine is not None, "begin comes before run"
        with self._lock:
            try:
                while self._turn(engine, check_peers):
                    pass
            # UserError: the model's file has changed while it was served
            except (EngineError, UserError) as error:
                self._fail(error)
                raise
            except Exception as error:
                failure = EngineError(
                    f"the engine broke: {type(error).__name__}: {error}; this is a bug, please report it"
                )
                self._fail(failure)
                raise failure from error

    def close(self) -> None:
        """Sends the remaining messages for at most a second and frees the socket."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._socket.close(linger=1000)
            self._context.term()

    def __enter__(self) -> "Coordinator":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _turn(self, engine: Engine, check_peers: Callable[[], None] | None) -> bool:
        """Handles messages, then runs one step. Returns False once drained."""
        if not engine.has_work and self.state != "draining":
            idle = self._last_beat + BEAT_SECONDS - time.monotonic()
            is_busy = engine.is_storing or self._adapter_load is not None
            self._socket.poll(max(0, int(1000 * (min(idle, STORING_SECONDS) if is_busy else idle))))
            engine.tend()
            if check_peers is not None:
                check_peers()
        begin = time.monotonic_ns()
        self._receive()
        if engine.lane is not None and engine.has_work:
            engine.lane.add(lib.ckdist_trace_receive, begin, time.monotonic_ns())
        if self._drain_requested and self.state != "draining":
            self._drain_end = time.monotonic() + self._drain_seconds + EARLY_END_SECONDS
            self._enter("draining")
        self._end_adapter_load(engine)
        if engine.has_work:
            outputs = self._step(engine)
            begin = time.monotonic_ns()
            for output in outputs:
                self._send_output(output)
            if engine.lane is not None:
                engine.lane.add(lib.ckdist_trace_send, begin, time.monotonic_ns(), len(outputs))
        self._ask_ranks(engine)
        self._beat()
        if self.state == "draining":
            if time.monotonic() > self._drain_end:
                self._fail_requests("the server is shutting down; send the request to another one", 503)
            return engine.has_work
        return True

    def _ask_ranks(self, engine: Engine) -> None:
        """Refreshes the reports of the ranks if they are due and a client watches."""
        now = time.monotonic()
        if self._ranks is not None and now < self._watched_until and now - self._last_report >= BEAT_SECONDS:
            self._last_report, self._last_beat = now, 0.0  # sends the status at once
            engine.collect_all()
            self._ranks.refresh()

    def _step(self, engine: Engine) -> list[Output]:
        """Runs one step. Meanwhile the second thread may use the socket."""
        self._step_begin = time.monotonic()
        self._lock.release()
        try:
            with self._turns:
                return engine.step()
        finally:
            self._lock.acquire()
            self._step_begin = None

    def _speak(self) -> None:
        """The second thread: answers while there is no engine, and sends the status when it is due."""
        while not self._closed.wait(BEAT_SECONDS / 4 if self._engine is None else BEAT_SECONDS):
            if self._lock.acquire(blocking=False):
                try:
                    if self._engine is None:
                        self._receive()
                    if self._step_age() < self._step_limit:
                        self._beat()
                finally:
                    self._lock.release()

    def _step_age(self) -> float:
        """Seconds since the running step began, or has packed weights: the first one may read all of them."""
        if self._step_begin is None or self._engine is None:
            return 0.0
        packed = float(self._engine.stats().get("weights_packed_bytes", 0))
        if packed != self._packed:
            self._packed, self._packed_at = packed, time.monotonic()
        return time.monotonic() - max(self._step_begin, self._packed_at)

    def _receive(self) -> None:
        """Handles the messages that have arrived, at most MESSAGES_PER_STEP. Those of one group come together."""
        for _ in range(MESSAGES_PER_STEP):
            if not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            peer, *frames = self._socket.recv_multipart()
            if peer not in self._peers and len(self._peers) < MAX_PEERS:
                self._peers.add(peer)
                self._send(peer, self._status())
            if frames != [b""]:  # an empty frame only announces the peer (ZMQ_PROBE_ROUTER)
                for frame in frames:
                    self._handle(peer, frame)

    def _handle(self, peer: bytes, frame: bytes) -> None:
        """Handles one message. Any fault in it becomes an error message."""
        request_id = None
        try:
            envelope = messages.read(frame, messages.ENVELOPE)
            request_id = envelope.request
            match messages.read(frame, TO_RANK_0):
                case Submit() | Embed() as request:
                    envelope.check_sampling()
                    self._submit(peer, request)
                case messages.LoadAdapter() | messages.UnloadAdapter() as request:
                    self._change_adapters(peer, request)
                case messages.Abort(id=key):
                    output = self._engine.abort((peer, key)) if self._engine is not None else None
                    if output is not None:
                        self._send_output(output)
                case messages.Drain():
                    self._drain_requested = True
                case messages.Watch():
                    self._watched_until = time.monotonic() + WATCH_SECONDS
                case messages.Hello():
                    self._abandon(peer)
        except EngineBusy as error:
            self._send_error(peer, request_id, str(error), error.field, 429)
        except UnknownAdapterError as error:
            self._send_error(peer, request_id, str(error), error.field, 404)
        except RequestError as error:
            self._send_error(peer, request_id, str(error), error.field, 400)
        except Exception as error:  # a bug in handling one message must not end all requests
            log.exception("a message could not be handled")
            self._send_error(
                peer,
                request_id,
                f"the message could not be handled: {type(error).__name__}; this is a bug, please report it",
                None,
                500,
            )

    def _submit(self, peer: bytes, request: Submit | Embed) -> None:
        """Queues a request. Raises RequestError or EngineBusy if that is not possible."""
        if self._engine is None or self.state != "ready" or self._drain_requested:
            what = (
                "is still loading; try again when /health says ready"
                if self.state == "loading"
                else "takes nothing new; send the request to another one"
            )
            self._send_error(peer, request.id, f"the server {what}", None, 503)
        elif peer not in self._peers:
            raise RequestError(f"{MAX_PEERS} clients are connected, of at most {MAX_PEERS}; close one")
        else:
            key, prompt = (peer, request.id), np.frombuffer(request.prompt, "<i4")
            if isinstance(request, Embed):
                self._engine.embed(key, prompt, request.pooling, request.first_text, request.tenant, request.place)
            else:
                more = {"drawn": np.frombuffer(request.drawn, "<i4"), "adapters": request.adapters}
                self._engine.add(key, prompt, request.sampling, request.tenant, request.place, **more)

    def _change_adapters(self, peer: bytes, request: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        """Unloads an adapter, or begins to load one. Raises RequestError if that is not possible."""
        engine = self._engine
        if engine is None or self.state != "ready":
            self._send_error(peer, request.id, "the server is loading, or shuts down; try again later", None, 503)
        elif isinstance(request, messages.LoadAdapter):
            engine.load_adapter(request.name, request.folder, request.replaces)
            self._adapter_load = peer, request.id
        else:
            engine.named_adapters().unload(request.name)
            self._adapters_changed(peer, request.id)

    def _end_adapter_load(self, engine: Engine) -> None:
        """Answers the load of an adapter once it has ended."""
        if self._adapter_load is None or engine.adapters is None or (load := engine.adapters.take_load()) is None:
            return
        (peer, request_id), self._adapter_load = self._adapter_load, None
        if load.digest:
            self._adapters_changed(peer, request_id)
        else:
            self._send_error(peer, request_id, load.reason, "lora_path", 400)

    def _adapters_changed(self, peer: bytes, request_id: str) -> None:
        self._last_beat = 0.0
        self._beat()  # before the answer, so that the client knows the adapters then
        self._send(peer, encode(messages.Done(request_id)))

    def _enter(self, state: str, error: str | None = None) -> None:
        """Changes the state and sends it to every peer."""
        self.state, self.error = state, error
        self._last_beat = 0.0
        self._beat()

    def _beat(self) -> None:
        """Sends every peer the status if it is due."""
        if time.monotonic() - self._last_beat >= BEAT_SECONDS:
            self._last_beat = time.monotonic()
            status = self._status()
            for peer in self._peers | {HTTP_ROUTING_ID}:
                self._send(peer, status)

    def _status(self) -> bytes:
        stats = self._engine.stats() if self._engine is not None else {}
        is_watched = self._ranks is not None and time.monotonic() < self._watched_until
        ranks = self._ranks.rows() if self._ranks is not None and is_watched else []
        adapters = self._engine and self._engine.adapters and self._engine.adapters.ids()
        return encode(messages.Status(self.state, self.error, self._model, stats, ranks, adapters, time.monotonic()))

    def _fail(self, error: CkdistError) -> None:
        """Ends all requests with an error: status 503 if a rank is lost, else 500."""
        self._fail_requests(str(error), 503 if isinstance(error, CommError) else 500, ends_engine=True)
        self._enter("failed", str(error))

    def _fail_requests(self, message: str, status: int, ends_engine: bool = False) -> None:
        engine = self._engine
        if engine is None:
            return
        for key in engine.ids:
            engine.abort(key)
            peer, request_id = _peer_and_id(key)
            self._send(peer, encode(messages.Failure(request_id, message, None, status, ends_engine)))

    def _send_output(self, output: Output) -> None:
        """Sends an output to the peer that made the request."""
        peer, request_id = _peer_and_id(output.id)
        if output.error is not None:
            self._send_error(peer, request_id, output.error, None, output.error_status)
            return
        if output.embedding is not None:
            vector = output.embedding.astype("<f4").tobytes()
            self._send(peer, encode(messages.Embedding(request_id, vector, output.prompt_tokens, output.cached_tokens)))
            return
        scores = None if output.prompt_logprobs is None else messages.PromptScores.pack(output.prompt_logprobs)
        message = Tokens(
            request_id, output.tokens, output.finish_reason, output.prompt_tokens, output.cached_tokens,
            output.cached_from, output.logprobs, scores, output.stop_token, output.cache_use,
        )  # fmt: skip
        self._send(peer, encode(message))

    def _send_error(self, peer: bytes, request_id: str | None, message: str, field: str | None, status: int) -> None:
        self._send(peer, encode(messages.Failure(request_id, message, field, status)))

    def _send(self, peer: bytes, data: bytes) -> None:
        """Sends to a peer. A peer that is gone or does not read is dropped, and its requests end."""
        try:
            self._socket.send_multipart((peer, data), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._peers.discard(peer)
            self._abandon(peer)

    def _abandon(self, peer: bytes) -> None:
        """Ends the requests of a peer that is gone or was restarted."""
        engine = self._engine
        if engine is None:
            return
        for key in engine.ids:
            if _peer_and_id(key)[0] == peer:
                engine.abort(key)


def _peer_and_id(key: Hashable) -> tuple[bytes, str]:
    """The peer that made a request, and the peer's id of it."""
    assert isinstance(key, tuple)
    peer, request_id = key
    return peer, request_id


def _check_directory(directory: str) -> None:
    """Raises ConfigError if `directory` is not private to this user, or its name is too long for a socket."""
    path = socket_address(directory).removeprefix("ipc://")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"socket path {path} has {len(os.fsencode(path))} bytes, of at most {MAX_SOCKET_PATH}; "
            "use a shorter temporary directory"
        )
    try:
        info = os.lstat(directory)
    except OSError as error:
        raise ConfigError(f"directory {directory} for the engine's socket cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ConfigError(
            f"directory {directory} for the engine's socket must be the user's own with mode 700, "
            f"not {stat.S_IMODE(info.st_mode):o}"
        )

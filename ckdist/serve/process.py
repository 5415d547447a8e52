"""Rank 0's side of the HTTP process: starts, watches, restarts, drains and stops it. No HTTP is handled here."""

import collections
import contextlib
import dataclasses
import logging
import os
import pathlib
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ckdist.config.engine_config import folder_and_size
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import CkdistError, ConfigError, EngineError
from ckdist.overrides import metadata_overrides
from ckdist.python_words import module_words
from ckdist.serve.addresses import close, is_local, url_of
from ckdist.serve.api_keys import VARIABLE, default_limits, given_keys, read_key_file
from ckdist.serve.error_output import ErrorOutput
from ckdist.serve.heartbeat import STUCK_SECONDS, FailureDetector
from ckdist.serve.settings import ENDED_SIGNAL, USER_ERROR, HttpSettings
from ckdist.tokens.tokenizer_source import CHAT_TEMPLATE

FEWEST_FILES = 128
KILL_SECONDS = 5.0
DEFAULT_BATCH_BYTES = 10 << 30
LOOK_SECONDS = 1.0
MAX_RESTARTS = 3  # within RESTART_SECONDS
RESTART_SECONDS = 60.0
REQUESTS_BESIDE_SEQUENCES = 512  # requests without sequences: they are read, refused or counted

# Flags that reach the HTTP process as they are. Those in OWN differ from the setting of the same name.
OWN = {"model", "models", "models_memory"}
FLAGS = [name for name in HttpSettings.__dataclass_fields__ if name in ServeConfig.__dataclass_fields__.keys() - OWN]

log = logging.getLogger(__name__)


def check_outputs(config: ServeConfig) -> None:
    """Makes the log file. Raises ConfigError if it or the collector cannot be used, or too few files may be open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if -1 < limit < FEWEST_FILES:  # -1: there is no limit
        remedy = "raise the hard limit with ulimit -Hn"
        raise ConfigError(f"{limit} files may be open, and the server needs {FEWEST_FILES}: {remedy}")
    if (path := config.log_file) is not None:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o640))
        except OSError as error:
            raise ConfigError(f"--log-file ({path}) cannot be written: {error.strerror}") from None
    if config.otlp_traces_endpoint is not None:
        from ckdist.serve.traces import check_traces

        check_traces(config.otlp_traces_endpoint)


def overrides_of(config: ServeConfig) -> dict[str, int | float | bool | str]:
    """Returns the values in place of the model's metadata: --override-kv, and the text of --chat-template-file.

    Raises ConfigError if the file is no template, or --chat-template-kwargs has a reserved name.
    """
    if config.chat_template_kwargs is not None:
        from ckdist.serve.requests.thinking import reserved_variable

        if name := reserved_variable(config.request_defaults.template_variables):
            raise ConfigError(f"--chat-template-kwargs cannot set {name!r:.64}: leave it out")
    overrides = metadata_overrides(config.override_kv)
    if config.chat_template_file is None:
        return overrides
    from ckdist.serve.template_file import read_template_file

    return overrides | {CHAT_TEMPLATE: read_template_file(config.chat_template_file)}


def allowed_hosts(
    config: ServeConfig, listeners: Iterable[socket.socket], asks_for_key: bool
) -> tuple[str, ...] | None:
    """Returns the names that the server answers to; None: any. Web pages could use a server without keys on loopback
    like its user.
    """
    open_on_loopback = all(map(is_local, listeners)) and not asks_for_key
    return (*config.host.split(","), *config.allowed_host) if config.allowed_host or open_on_loopback else None


def adapter_name(config: ServeConfig) -> str | None:
    """Returns the name of the folder of the adapter for all requests, or None."""
    folder = config.fixed_adapter
    return None if folder is None else pathlib.Path(os.path.abspath(folder)).name  # noqa: PTH100 - no links


def absolute(path: str | None) -> str | None:
    """Returns an absolute path. Links in it stay, because they may change."""
    return None if path is None else os.path.abspath(path)  # noqa: PTH100


def batch_settings(config: ServeConfig) -> dict[str, Any]:
    """Returns the folder of --batch-dir and its most bytes."""
    if config.batch_dir is None:
        return {}
    folder, size = folder_and_size(config.batch_dir, "--batch-dir")
    return {"batch_folder": folder, "batch_bytes": size or DEFAULT_BATCH_BYTES}


class HttpProcess:
    """A running HTTP process, which answers at `url`.

    If it is killed or stuck, it is restarted on the same listening socket, at most MAX_RESTARTS times in
    RESTART_SECONDS. Its clients' connections end then. If it exits by itself, it is not restarted.
    """

    def __init__(self, settings: HttpSettings, listener: socket.socket, *others: socket.socket):
        """`settings` has the descriptors of `listener` and `others`. `stop` closes these sockets.

        Raises EngineError if the process does not start, and ConfigError if --prefill-file is wrong.
        """
        self._settings = settings
        ahead = {settings.prefill_file, *(model.prefill_file for model in settings.models)} - {None}
        if ahead:
            from ckdist.serve.prefill_file import read_prefill_file

            for path in filter(None, ahead):
                read_prefill_file(path, {key.name for key in (*settings.api_keys, *settings.file_keys)})
        self.url = self.url_of(listener)
        self._listeners = [listener, *others]
        self._ending = False  # `drain` was called
        self._restarts: collections.deque[float] = collections.deque()
        self._process, self._detector, self._errors = self._spawn()
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="ckdist-http")
        self._keeper.start()

    def url_of(self, listener: socket.socket) -> str:
        """Returns the URL of one of its listening sockets, with the prefix of its paths."""
        return url_of(listener, self._settings.ssl_certfile is not None) + self._settings.api_prefix

    @classmethod
    def start(
        cls,
        config: ServeConfig,
        endpoint: str,
        model: str,
        model_name: str,
        listener: socket.socket,
        metrics: socket.socket | None = None,
        cpus: Collection[int] | None = None,
        own: Mapping[str, Any] | None = None,
        more: Sequence[socket.socket] = (),
    ) -> "HttpProcess":
        """Starts the process. It answers 503 until rank 0's status is "ready". Raises ConfigError for unreadable keys.

        `endpoint` is the address of rank 0's ROUTER. `model` is the GGUF file or folder with the tokenizer. This object
        owns `listener`, `more` and `metrics` (for --metrics-port). `cpus`: those that it may use; None: this process's.
        `own`: settings of this kind of server.
        """
        check_outputs(config)
        api_keys, file_keys = given_keys(config), read_key_file(config.api_key_file) if config.api_key_file else ()
        sequences = config.parallel + config.max_queue
        flags = {name: getattr(config, name) for name in FLAGS}
        settings = HttpSettings(
            endpoint=endpoint,
            model=model,
            model_name=config.alias or model_name,
            overrides=overrides_of(config),
            defaults=config.request_defaults,
            listener=listener.fileno(),
            metrics_listener=-1 if metrics is None else metrics.fileno(),
            more_listeners=tuple(one.fileno() for one in more),
            parent=os.getpid(),
            cpus=tuple(sorted(os.sched_getaffinity(0) if cpus is None else cpus)),
            api_keys=api_keys,
            file_keys=file_keys,
            key_limits=default_limits(config),
            allowed_hosts=allowed_hosts(config, (listener, *more), bool(api_keys or file_keys)),
            max_sequences=sequences,
            max_requests=sequences + REQUESTS_BESIDE_SEQUENCES,
            adapter=adapter_name(config),
            **{**flags, "lora_dir": absolute(config.lora_dir), **batch_settings(config), **(own or {})},
        )
        return cls(settings, listener, *more, *filter(None, [metrics]))

    @property
    def pid(self) -> int:
        """The process id, which changes with a restart."""
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs or is restarted.

        A SIGTERM of `drain` that arrived before the process could handle signals is no failure.
        """
        if self._keeper.is_alive() and not self._ending:
            return None
        code = self._process.poll()
        return 0 if self._ending and code == -signal.SIGTERM else code

    def failure(self) -> CkdistError | None:
        """Returns an error with the reason if the process has exited by itself with a code other than 0.

        USER_ERROR is the code of a mistake of the user.
        """
        if not (code := self.poll()):
            return None
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        reason = self._errors.last_line() or "it wrote no message"
        if code == USER_ERROR:
            return ConfigError(reason.partition("ERROR: ")[2] or reason)
        return EngineError(f"the HTTP process {how}: {reason}")

    def wait_answering(self, seconds: float) -> None:
        """Waits until the process answers requests or has ended, at most `seconds`."""
        end = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < end and not self._detector.answering.wait(LOOK_SECONDS):
            pass

    def drain(self) -> None:
        """Makes the process refuse new requests, finish running ones, and exit.

        Returns at once, since rank 0 must go on with its steps.
        """
        self._ending = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def expect_next_engine(self) -> None:
        """Makes the process continue its requests on the next engine. Call this when one has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(ENDED_SIGNAL)

    def read_keys_again(self) -> None:
        """Makes the process read its key file again. A restarted process reads the file anyway."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGHUP)

    def stop(self, timeout: float = KILL_SECONDS) -> int:
        """Drains if that has not begun, waits `timeout` seconds, and kills the process if it still runs.

        It sends no second signal, since that would mean an immediate end. Returns the exit code.
        """
        if not self._ending:
            self.drain()
        self._keeper.join(timeout)
        if self._keeper.is_alive():
            self._kill()
            self._keeper.join()
        for listener in self._listeners:
            close(listener)
        code = self.poll()
        assert code is not None, "the keeper ends after the process"
        return code

    def _spawn(self) -> tuple[subprocess.Popen[bytes], FailureDetector, ErrorOutput]:
        reading, writing = os.pipe()
        errors, own = ErrorOutput(), os.dup(2)
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
        # The process inherits the mask, so that these signals wait until it has handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, ENDED_SIGNAL})
        try:
            process = subprocess.Popen(
                module_words("ckdist.serve"),
                stdin=subprocess.PIPE,
                stderr=errors.writing,
                pass_fds=(*(listener.fileno() for listener in self._listeners), writing, own),
                start_new_session=True,  # signals for rank 0's group must not end it before it has answered its clients
                env={**environment, "TOKENIZERS_PARALLELISM": "false"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(writing)
        os.close(own)
        errors.started()
        assert process.stdin is not None
        try:
            self._settings = self._settings.with_current_keys()
            process.stdin.write(dataclasses.replace(self._settings, heartbeat=writing, log=own).to_json())
            process.stdin.close()
        except OSError as error:
            process.kill()
            process.wait()
            os.close(reading)
            raise EngineError(f"the HTTP process ended at its start: {errors.last_line() or error.strerror}") from None
        return process, FailureDetector(reading), errors

    def _keep(self) -> None:
        """Watches and restarts the process until it has ended for good."""
        while True:
            while not self._detector.wait(LOOK_SECONDS) and self._process.poll() is None:
                pass
            stuck = self._lives()
            self._kill()  # including the processes that it has started
            code = self._process.wait()
            self._detector.close()
            if self._ending or code >= 0 or not self._start_again(stuck, code):
                return

    def _start_again(self, stuck: bool, code: int) -> bool:
        what = f"has shown no sign of life for {STUCK_SECONDS:g} s" if stuck else f"was ended by signal {-code}"
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > RESTART_SECONDS:
            self._restarts.popleft()
        if len(self._restarts) >= MAX_RESTARTS:
            most = f"after {MAX_RESTARTS} restarts in {RESTART_SECONDS:g} s"
            log.error("the HTTP process %s; it is not restarted again, %s", what, most)
            return False
        self._restarts.append(now)
        log.warning("the HTTP process %s; it is restarted, and its clients' requests have ended", what)
        try:
            self._process, self._detector, self._errors = self._spawn()
        except (EngineError, OSError) as error:
            log.error("the HTTP process cannot be restarted: %s", error)
            return False
        if self._ending:  # `drain` was called meanwhile
            self._process.send_signal(signal.SIGTERM)
        return True

    def _lives(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)  # its heartbeats end a moment before it does
        return self._process.poll() is None

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

"""The HTTP process as rank 0 holds it: started, watched, drained and stopped. Nothing of HTTP happens on this side."""

import os
import signal
import socket
import subprocess
import sys

from ckdist.config import ServeConfig
from ckdist.errors import ConfigError, EngineError
from ckdist.overrides import metadata_overrides
from ckdist.serve.settings import HttpSettings, read_api_keys

BACKLOG = 1024
KILL_SECONDS = 5.0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything heavy is done. ConfigError when the port is taken or the host is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host ({host}) is not known: {getattr(error, 'strerror', error)}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose another --host or --port") from None
    return listener


class HttpProcess:
    """A running HTTP process. `url` is where it answers."""

    def __init__(self, process: subprocess.Popen, url: str):
        self._process, self.url, self._draining = process, url, False

    @classmethod
    def start(cls, config: ServeConfig, endpoint: str, model: str, model_name: str, listener: socket.socket) -> "HttpProcess":
        """Start the process; it answers 503 until rank 0's status is "ready".

        `endpoint` is where rank 0's ROUTER is bound; `model` the GGUF file or folder whose tokenizer is used; `listener` comes
        from `listen` and is closed here, so that the port is free as soon as the process ends. ConfigError for unreadable keys.
        """
        host, port = listener.getsockname()[:2]
        settings = HttpSettings(
            endpoint=endpoint,
            model=model,
            model_name=config.alias or model_name,
            overrides=metadata_overrides(config.override_kv),
            listener=listener.fileno(),
            parent=os.getpid(),
            api_keys=read_api_keys(config),
            parallel=config.parallel,
            max_sequences=config.parallel + config.max_queue,
            max_body=config.max_body,
            timeout=config.timeout,
            drain_timeout=config.drain_timeout,
            strict_fields=config.strict_fields,
            adapter=os.path.basename(os.path.abspath(config.lora)) if config.lora else None,
            verbose=config.verbose,
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "ckdist.serve"],
            stdin=subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            start_new_session=True,  # signals for rank 0's group must not end it before it has answered its clients
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            process.stdin.write(settings.to_json())
            process.stdin.close()
        except OSError as error:
            process.kill()
            process.wait()
            raise EngineError(f"the HTTP process ended at its start: {error.strerror}; its own message is above") from None
        listener.close()
        return cls(process, f"http://{f'[{host}]' if ':' in host else host}:{port}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, None while it runs. To be told to drain before it could handle signals is no failure."""
        code = self._process.poll()
        return 0 if self._draining and code == -signal.SIGTERM else code

    def drain(self) -> None:
        """Ask it to refuse new requests, let running ones finish, and end. Returns at once; rank 0 must go on with its steps."""
        if self.poll() is None:
            self._draining = True
            self._process.send_signal(signal.SIGTERM)

    def stop(self, timeout: float = KILL_SECONDS) -> int:
        """Drain unless it was told to, since a second word means at once; wait `timeout` seconds, then kill. Returns the exit code."""
        if not self._draining:
            self.drain()
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

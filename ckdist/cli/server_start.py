"""The start of `ckdist serve`: the model's name, the ports, and the lines that say how to use the server."""

import json
import logging
import os
import pathlib
import signal
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from ckdist.cli.serve import DRAIN_SIGNALS
from ckdist.config.engine_config import EngineConfig
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError
from ckdist.serve.addresses import UNIX, check_certificate, close, is_local, listen, listen_all
from ckdist.serve.api_keys import asks_for_key
from ckdist.serve.process import HttpProcess

ANSWERING_SECONDS = 60.0  # then the address is printed even if the HTTP process still answers 503

log = logging.getLogger(__name__)


def model_name(config: EngineConfig) -> str:
    """Returns the model's name for clients without --alias: its file or folder, also at a URL, or the name in -m."""
    if not config.model:
        return "ckdist-bundled"
    from ckdist.hub.model_url import is_url

    if is_url(config.model) or pathlib.Path(config.model).exists():
        return pathlib.Path(config.model.partition("?")[0]).stem
    return config.model.removeprefix("hf:")


def curl_line(url: str, config: ServeConfig, task: str) -> str:
    """Returns a curl line to try the server. `task`: a path under /v1."""
    key = ' -H "Authorization: Bearer $API_KEY"' if asks_for_key(config) else ""
    question = "Explain in two sentences why the sky is blue."
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": "def main(", "max_tokens": 32, "temperature": 0},
        "chat/completions": {
            "messages": [{"role": "user", "content": question}], "max_tokens": 128, "temperature": 0
        },
        "embeddings": {"input": "the sky is blue"},
        "rerank": {"query": "why is the sky blue", "documents": ["light scatters in air", "it rains"]},
    }  # fmt: skip
    body = json.dumps(bodies[task])
    if url.startswith(UNIX):
        where = url[len(UNIX) :].removesuffix(config.api_prefix)
        url = f"--unix-socket '{where}' http://localhost{config.api_prefix}"
    return f"curl {url}/v1/{task} -H 'Content-Type: application/json'{key} -d '{body}'"


class Listeners(NamedTuple):
    """Rank 0's listening sockets."""

    http: socket.socket
    metrics: socket.socket | None  # of --metrics-port
    more: tuple[socket.socket, ...] = ()  # of further addresses in --host


def open_line(config: ServeConfig, listeners: Listeners) -> str | None:
    """Returns a warning if other hosts can reach the server and it requires no key."""
    reachable = [one for one in (listeners.http, *listeners.more) if not is_local(one)]
    if asks_for_key(config) or not reachable:
        return None
    address, port = reachable[0].getsockname()[:2]
    remedy = "--api-key-file or CKDIST_API_KEY requires a key"
    return f"any client that reaches {address} port {port} can use this server; {remedy}"


def handle_signals(
    config: ServeConfig, listeners: Listeners, http: HttpProcess, on_drain: Callable[[], None] = lambda: None
) -> Callable[..., None]:
    """Installs handlers: DRAIN_SIGNALS drain the server, and SIGHUP reloads the key file if there is one.

    Warns once of a server that needs no key.

    Returns:
        Refuses new requests, and ends the server when the running ones are done.
    """

    def drain(*_: object) -> None:
        http.drain()
        on_drain()

    for number in DRAIN_SIGNALS:
        signal.signal(number, drain)
    if config.api_key_file is not None:
        signal.signal(signal.SIGHUP, lambda *_: http.read_keys_again())
    if line := open_line(config, listeners):
        log.warning("%s", line)
    return drain


def open_listeners(config: ServeConfig) -> Listeners:
    """Binds the ports before any expensive work. Raises ConfigError if a flag about them cannot be followed."""
    if config.ssl_certfile or config.ssl_keyfile:
        check_certificate(config.ssl_certfile, config.ssl_keyfile)
    http, *more = listen_all(config.host, config.port)
    listeners = Listeners(http, None, tuple(more))
    line = open_line(config, listeners)
    if line and not config.no_auth:
        for listener in (http, *more):
            close(listener)
        raise ConfigError(f"{line}; --no-auth serves without one")
    if config.metrics_port is None:
        return listeners
    first = next((name for name in config.host.split(",") if not name.startswith(UNIX)), "127.0.0.1")
    return listeners._replace(metrics=listen(first, config.metrics_port, "--metrics-port"))


def keys_line(config: ServeConfig) -> str | None:
    """Returns the advice on reloading the key file, if there is one."""
    return None if config.api_key_file is None else f"To read the API keys again: kill -HUP {os.getpid()}"


def say_ready(
    config: ServeConfig,
    listeners: Listeners,
    http: HttpProcess,
    name: str,
    lines: list[str],
    task: str,
    advice: str | None = None,
) -> None:
    """Prints the lines about the start, the address, and advice. `task`: as for `curl_line`."""
    serving = f"serving {name} at {http.url}  try: {curl_line(http.url, config, task)}"
    lines = [*lines, serving, *filter(None, [advice, keys_line(config)])]
    if config.prefill_file is not None:
        lines.append("the prompts of --prefill-file are computed first; /health says when requests are answered")
    if listeners.metrics is not None:
        lines.append(f"metrics at {http.url_of(listeners.metrics)}/metrics, without a key")
    print(*lines, sep="\n", flush=True)
    if "NOTIFY_SOCKET" in os.environ:
        from ckdist.serve.notify import notify

        notify("READY=1", f"STATUS=serving {name} at {http.url}")

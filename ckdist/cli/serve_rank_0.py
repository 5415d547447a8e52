"""Rank 0 of `ckdist serve`: its ports, the HTTP process, and the engine's loop.

The port is bound before any expensive work. The HTTP process answers 503 while the model loads.
"""

import contextlib
import json
import logging
import math
import os
import pathlib
import signal
import socket
from collections.abc import Callable, Collection
from typing import NamedTuple

from ckdist.cli.serve import DRAIN_SIGNALS
from ckdist.cli.session import dismissing
from ckdist.cli.start_lines import log_map, parameter_facts, start_lines
from ckdist.comm.world_protocol import World
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.coordinator import Coordinator
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import BUNDLED, load_model
from ckdist.engine.loaded_model import Model
from ckdist.engine.model_engine import make_engine
from ckdist.engine.rank_reports import RankReports
from ckdist.engine.socket_directory import socket_directory
from ckdist.errors import ConfigError
from ckdist.models.spec import ModelSpec
from ckdist.serve.addresses import UNIX, close, is_local, listen, listen_all
from ckdist.serve.api_keys import asks_for_key
from ckdist.serve.process import HttpProcess
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.weights.stored_pooling import stored_pooling

DRAINED_VARIABLE = "CKDIST_DRAINED"  # launch/drained sets it: with it mpirun may get SIGTERM

STORING_SECONDS = 5.0  # after a drain, for blocks that are not on disk yet
ANSWERING_SECONDS = 60.0  # then the address is printed even if the HTTP process still answers 503

log = logging.getLogger(__name__)


def model_name(config: ServeConfig) -> str:
    """Returns the model's name for clients without --alias: its file or folder, also at a URL, or the name in -m."""
    if not config.model:
        return "ckdist-bundled"
    from ckdist.hub.model_url import is_url

    if is_url(config.model) or pathlib.Path(config.model).exists():
        return pathlib.Path(config.model.partition("?")[0]).stem
    return config.model.removeprefix("hf:")


def curl_line(url: str, config: ServeConfig, chats: bool, spec: ModelSpec | None = None) -> str:
    """Returns a curl line to try the server: a question if the model `chats`, else a text to continue or embed."""
    key = ' -H "Authorization: Bearer $API_KEY"' if asks_for_key(config) else ""
    path, body = "completions", {"prompt": "def main(", "max_tokens": 32}
    if chats and (spec is None or spec.encoder is None):
        question = "Explain in two sentences why the sky is blue."
        path, body = "chat/completions", {"messages": [{"role": "user", "content": question}], "max_tokens": 128}
    body = {**body, "temperature": 0}
    if spec is not None and not spec.generates:
        path, body = "embeddings", {"input": "the sky is blue"}
    if spec is not None and spec.scorer is not None:
        path, body = "rerank", {"query": "why is the sky blue", "documents": ["light scatters in air", "it rains"]}
    body = json.dumps(body)
    if url.startswith(UNIX):
        where = url[len(UNIX) :].removesuffix(config.api_prefix)
        url = f"--unix-socket '{where}' http://localhost{config.api_prefix}"
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'"


def model_facts(config: ServeConfig, model: Model) -> dict[str, str | int]:
    """Returns the facts about the model that the HTTP process needs.

    Returns:
        architecture, num_parameters, type, size_bytes: For clients that ask; the type is that of most parameters.
        pooling: The kind of pooling.
        sequences: Most texts in a step.
        scores: The function from a cross-encoder's output to a score; "" for other models.
        encodes: Whether an encoder reads prompts.
    """
    scorer, sequences = model.spec.scorer, model.plan.cache.max_sequences
    pooling = stored_pooling(model.checkpoint) if config.pooling == "auto" or scorer else config.pooling
    scores = "" if scorer is None else "sigmoid" if scorer.sigmoid else "identity"
    count, kind, size = parameter_facts(model)
    about = {"architecture": model.spec.family, "num_parameters": count, "type": kind, "size_bytes": size}
    embeds = {"pooling": pooling, "sequences": sequences, "scores": scores}
    return {**about, **embeds, "encodes": model.spec.encoder is not None}


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


def open_listeners(config: ServeConfig) -> Listeners:
    """Binds the ports before any expensive work. Raises ConfigError if a flag about them cannot be followed."""
    if config.ssl_certfile or config.ssl_keyfile:
        from ckdist.serve.certificate import check_certificate

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


def is_orphan(parent: int) -> bool:
    """Whether Open MPI's launcher, the process `parent`, has ended."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ and os.getppid() != parent


def stop_line() -> str | None:
    """Returns the advice on stopping a job of Open MPI without interrupting streams.

    After SIGTERM, mpirun kills its ranks within half a second. Other launchers wait.
    """
    if "OMPI_COMM_WORLD_SIZE" not in os.environ or DRAINED_VARIABLE in os.environ:
        return None
    return f"To stop without cutting streams: kill -TERM {os.getpid()}"


def keys_line(config: ServeConfig) -> str | None:
    """Returns the advice on reloading the key file, if there is one."""
    return None if config.api_key_file is None else f"To read the API keys again: kill -HUP {os.getpid()}"


def handle_signals(config: ServeConfig, http: HttpProcess, coordinator: Coordinator) -> None:
    """Installs handlers: DRAIN_SIGNALS drain the server, and SIGHUP reloads the key file if there is one."""

    def drain(*_: object) -> None:
        """Refuses new requests, and ends the server when the running ones are done."""
        http.drain()
        coordinator.request_drain()

    for number in DRAIN_SIGNALS:
        signal.signal(number, drain)
    if config.api_key_file is not None:
        signal.signal(signal.SIGHUP, lambda *_: http.read_keys_again())


def logged_lines(name: str, model: Model) -> list[str]:
    """Returns the lines about the start, and logs where ranks are placed. A collective call."""
    lines, advice = start_lines(name, model)
    log_map(model)
    for line in advice[:1]:
        log.warning("%s", line)
    return lines


def say_ready(config: ServeConfig, listeners: Listeners, http: HttpProcess, name: str, lines: list[str]) -> None:
    """Prints the lines about the start, and advice after them."""
    lines += filter(None, [stop_line(), keys_line(config)])
    if config.prefill_file is not None:
        lines.append("the prompts of --prefill-file are computed first; /health says when requests are answered")
    if listeners.metrics is not None:
        lines.append(f"metrics at {http.url_of(listeners.metrics)}/metrics, without a key")
    print(*lines, sep="\n", flush=True)
    if "NOTIFY_SOCKET" in os.environ:
        from ckdist.serve.notify import notify

        notify("READY=1", f"STATUS=serving {name} at {http.url}")


def load_engine(config: ServeConfig, world: World) -> tuple[Model, Engine, Tokenizer]:
    """Loads the model and makes rank 0's engine. A collective call: other ranks call `load_model`."""
    model = load_model(config, world, progress=True, embeddings=True)
    with dismissing(model, world):
        limit = config.max_step_ms / 1000 or math.inf
        engine, tokenizer = make_engine(model, config, config.max_queue + config.parallel, limit)
        if engine.grammars is not None and tokenizer.eos_token_ids:
            engine.grammars.prepare()
    return model, engine, tokenizer


def serve(
    config: ServeConfig,
    world: World,
    listeners: Listeners,
    name: str,
    cpus: Collection[int],
    parent: int,
    on_ready: Callable[[str, Callable[[], None]], None] | None = None,
) -> None:
    """Serves until the server is stopped. Raises EngineError if the HTTP process fails.

    Args:
        name: The model's name for clients.
        cpus: The CPUs that the HTTP process may use.
        parent: The process that started this one.
        on_ready: Takes the URL and a function that ends the server. The lines about the start are not printed then.
    """
    with contextlib.ExitStack() as held:
        directory = held.enter_context(socket_directory())
        coordinator = held.enter_context(
            Coordinator(directory, {"id": name}, step_limit=config.comm_timeout * 4, drain_seconds=config.drain_timeout)
        )
        path, (first, metrics, more) = os.fspath(config.model or BUNDLED), listeners
        http = HttpProcess.start(config, coordinator.address, path, name, first, metrics, cpus, more=more)
        held.callback(http.stop)
        if line := open_line(config, listeners):
            log.warning("%s", line)
        handle_signals(config, http, coordinator)
        model, engine, tokenizer = load_engine(config, world)
        lines = logged_lines(name, model)
        coordinator.begin(engine, RankReports(model), model_facts(config, model))
        http.wait_answering(ANSWERING_SECONDS)
        if on_ready is not None:
            on_ready(http.url, coordinator.request_drain)
        else:
            curl = curl_line(http.url, config, bool(tokenizer.templates), model.spec)
            say_ready(config, listeners, http, name, [*lines, f"serving {name} at {http.url}  try: {curl}"])

        def watch() -> None:
            """Checks the peers, the launcher, the loader and the HTTP process between two steps."""
            model.executable.check_peers()
            if is_orphan(parent):  # it was killed, and nothing else would end its ranks
                coordinator.request_drain()
            model.loader.check()
            if failure := http.failure():
                raise failure
            if http.poll() == 0:  # it has drained
                coordinator.request_drain()

        with model.traced():
            coordinator.run(check_peers=watch)
            engine.finish_storing(STORING_SECONDS)
        http.stop(config.drain_timeout)
    model.close()  # after the coordinator, whose second thread reads the model's counters
    world.close()

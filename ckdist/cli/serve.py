"""`ckdist serve`: rank 0 holds the HTTP process and the engine's loop; the other ranks compute.

The port is taken before anything heavy is done, and the HTTP process answers 503 while the model loads.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import shutil
import signal
import tempfile

from ckdist.cli.session import dismissing
from ckdist.cli.start_lines import start_lines
from ckdist.comm.world import start_world, together
from ckdist.config import ServeConfig
from ckdist.engine.coordinator import Coordinator
from ckdist.engine.launch import BUNDLED, load_model, make_engine
from ckdist.errors import EngineError
from ckdist.hub.resolve import resolve
from ckdist.serve.process import HttpProcess, listen

log = logging.getLogger(__name__)


def model_name(config: ServeConfig) -> str:
    """What clients call the model without --alias: the name of its file or folder, or the name that was asked for."""
    if not config.model:
        return "ckdist-bundled"
    return pathlib.Path(config.model).stem if os.path.exists(config.model) else config.model.removeprefix("hf:")


def curl_line(url: str, config: ServeConfig, chats: bool) -> str:
    """A line to try the server with: a question to a model that `chats`, else a text to go on with."""
    key = ' -H "Authorization: Bearer $API_KEY"' if config.api_key or config.api_key_file else ""
    path, body = "completions", {"prompt": "def main(", "max_tokens": 32}
    if chats:
        question = "Explain in two sentences why the sky is blue."
        path, body = "chat/completions", {"messages": [{"role": "user", "content": question}], "max_tokens": 128}
    body = json.dumps({**body, "temperature": 0})
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'"


def work(config: ServeConfig, world) -> int:
    """Ranks other than 0. A terminal's Ctrl-C and a launcher's SIGTERM reach every rank; rank 0 drains and says when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    model = load_model(config, world)
    start_lines("", model)
    model.placement_map()
    model.executable.work()
    model.close()
    world.close()
    return 0


def run(config: ServeConfig) -> int:
    world = start_world()
    listener = together(world, lambda: listen(config.host, config.port) if world.rank == 0 else None)
    name = config.alias or model_name(config)
    config = dataclasses.replace(config, model=resolve(config.model, world))
    if world.rank != 0:
        return work(config, world)
    with contextlib.ExitStack() as held:
        directory = tempfile.mkdtemp(prefix="ckdist-")
        held.callback(shutil.rmtree, directory, ignore_errors=True)
        coordinator = held.enter_context(Coordinator(directory, {"id": name}, step_limit=config.comm_timeout * 4, drain_seconds=config.drain_timeout))
        http = HttpProcess.start(config, coordinator.address, os.fspath(config.model or BUNDLED), name, listener)
        held.callback(http.stop)

        def drain(*_):
            http.drain()
            coordinator.request_drain()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, drain)
        model = load_model(config, world, progress=True)
        with dismissing(model, world):
            engine, tokenizer = make_engine(model, config.max_queue + config.parallel)
        lines, advice = start_lines(name, model)
        log.debug("%s", model.placement_map())
        for line in advice[:1]:
            log.warning("%s", line)
        curl = curl_line(http.url, config, tokenizer.chat_template is not None)
        print(*lines, f"serving {name} at {http.url}  try: {curl}", sep="\n", flush=True)

        def watch():
            model.executable.check_peers()
            model.loader.check()
            if http.poll():
                raise EngineError(f"the HTTP process ended with code {http.poll()}; its own message is above")
            if http.poll() == 0:  # it was told to drain, and has
                coordinator.request_drain()

        with model.traced():
            coordinator.run(engine, check_peers=watch)
        http.stop(config.drain_timeout)
        model.close()
    world.close()
    return 0

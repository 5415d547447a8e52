"""Rank 0 of a job whose HTTP process started it: the engine's loop, without ports."""

import contextlib
import fcntl
import os
import signal

from ckdist.cli.serve import DRAIN_SIGNALS
from ckdist.cli.serve_rank_0 import STORING_SECONDS, load_engine, model_facts
from ckdist.cli.start_lines import log_map, parameters, start_lines
from ckdist.comm.world_protocol import World
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.coordinator import Coordinator
from ckdist.engine.rank_reports import RankReports
from ckdist.engine.socket_directory import TURNS


class Turns(contextlib.AbstractContextManager[None]):
    """An exclusive lock on a file, so that one engine at a time runs a step. The kernel frees it if the holder dies."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def serve(config: ServeConfig, world: World, directory: str, name: str) -> None:
    """Answers on the socket in `directory` until it is drained. Raises EngineError if a rank is lost."""
    turns = Turns(os.environ[TURNS]) if TURNS in os.environ else None
    with Coordinator(
        directory, {"id": name}, step_limit=config.comm_timeout * 4, drain_seconds=config.drain_timeout, turns=turns
    ) as coordinator:
        for number in DRAIN_SIGNALS:
            signal.signal(number, lambda *_: coordinator.request_drain())
        model, engine, tokenizer = load_engine(config, world)
        start_lines(name, model)
        log_map(model)
        facts = {"parameters": parameters(model), "generates": model.spec.generates, "chats": bool(tokenizer.templates)}
        coordinator.begin(engine, RankReports(model), model_facts(config, model) | facts)

        def watch() -> None:
            """Checks the peers and the loader between two steps."""
            model.executable.check_peers()
            model.loader.check()

        with model.traced():
            coordinator.run(check_peers=watch)
            engine.finish_storing(STORING_SECONDS)
    model.close()  # after the coordinator, whose second thread reads the model's counters
    world.close()

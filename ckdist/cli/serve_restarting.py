"""`ckdist serve` of one model on one host or under `ckdist launch`: an engine and an HTTP process, which outlive each
other.

This process is the parent of both. It restarts an engine that ends. The HTTP process keeps the connections and the
queue, and continues its requests on the next engine.
"""

import asyncio
import dataclasses
import logging
import os
import pathlib
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence

from ckdist.cli.command_ranks import wanted_ranks
from ckdist.cli.model_table import ModelEntry
from ckdist.cli.server_start import (
    ANSWERING_SECONDS,
    Listeners,
    handle_signals,
    model_name,
    open_listeners,
    say_ready,
)
from ckdist.config.serve_config import ServeConfig
from ckdist.engine.socket_directory import LOST, READY, SOCKET, socket_address, socket_directory
from ckdist.errors import EngineError
from ckdist.hub.bundled import BUNDLED
from ckdist.launcher.keeper import Keeper
from ckdist.serve.engine_job import EngineJob
from ckdist.serve.process import HttpProcess
from ckdist.serve.settings import STALE_SECONDS, STALE_SIGNAL

RANK_0 = "[0] "  # before each line of rank 0 under `ckdist launch`
LOOK_SECONDS = 0.2
START_LOOK_SECONDS = 0.02
MAX_RESTARTS = 3  # within RESTART_SECONDS
RESTART_SECONDS = 120.0
LAUNCHED_RESTART_SECONDS = 600.0  # for --restarts of `ckdist launch`
STOP_SECONDS = 10.0  # limit for an engine without requests to end

log = logging.getLogger(__name__)


class RestartedEngine:
    """The engine's job at `address`, which may be started again. Leaving the `with` block ends it.

    Args:
        launch, restarts, ranks: As for `run`.

    Attributes:
        is_ready: Whether an engine has been ready.
        news: Set if a line about the engine has arrived, or its output has ended.
        lost: Why its ranks have ended; "" unless their launcher waits for `restart` or `give_up`.
    """

    def __init__(
        self, config: ServeConfig, name: str, directory: str, launch: Sequence[str], restarts: int, ranks: int
    ) -> None:
        self._launch, self._most = launch, restarts or MAX_RESTARTS
        self._within = LAUNCHED_RESTART_SECONDS if restarts else RESTART_SECONDS
        words = ModelEntry(name=name, config=config).words
        model = () if config.model is None else (f"--model={config.model}",)
        self._words = (*words, *model, f"--drain-timeout={config.drain_timeout}")
        self._directory, self.address = directory, socket_address(directory)
        self._keeper = None if config.no_keep_weights else Keeper()
        self._ranks = ranks or wanted_ranks(config)
        self.is_ready = False
        self._is_stuck, self._silence, self.lost, self.news = False, "", "", threading.Event()
        self._restarted_at: deque[float] = deque()
        self._start()

    def __enter__(self) -> "RestartedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.job.kill()

    def start_lines(self) -> list[str] | None:
        """Returns the lines about the start and, as the last one, the task. None: the engine is not ready."""
        try:
            lines = self._lines.get_nowait()
        except queue.Empty:
            return None
        self.is_ready = True
        return lines

    def note_stuck(self) -> None:
        """Notes that the engine gives no sign of life. Safe in a signal handler."""
        self._is_stuck = True

    def end_if_stuck(self) -> None:
        """Kills the engine after `note_stuck`, unless it is too young to have been silent: the last one was meant."""
        if self._is_stuck:
            self._is_stuck = False
            if time.monotonic() - self._begun > STALE_SECONDS:
                self._silence = f"gave no sign of life for {STALE_SECONDS:g} s"
                self.job.kill()

    def restart(self, http: HttpProcess) -> None:
        """Starts the engine or its ranks again. Raises EngineError if that happened too often."""
        reason, now = self.lost or self._silence or self.job.reason(), time.monotonic()
        pathlib.Path(self._directory, SOCKET).unlink(missing_ok=True)
        http.expect_next_engine()
        while self._restarted_at and now - self._restarted_at[0] > self._within:
            self._restarted_at.popleft()
        if len(self._restarted_at) >= self._most:
            most = f"after {self._most} restarts in {self._within:g} s it is not restarted again"
            raise EngineError(f"the engine has ended ({reason}); {most}")
        self._restarted_at.append(now)
        log.warning("the engine has ended (%s); it is restarted, and its requests go on", reason)
        self.lost, self._silence, self._begun = "", "", now
        if self.job.has_ended:
            self._start()
        else:
            self.job.answer(restart=True)

    def give_up(self) -> None:
        """Makes the launcher of ranks that have ended end too."""
        self.lost = ""
        self.job.answer(restart=False)

    def stop(self) -> None:
        """Ends the engine, which may store blocks and write a trace once it has loaded."""
        asyncio.run(self.job.stop(STOP_SECONDS if self.is_ready or self._launch else 0.0))

    def _start(self) -> None:
        more = {"launch": self._launch, "again": self.is_ready, "keeper": self._keeper, "ranks": self._ranks}
        self.job = EngineJob(self._words, directory=self._directory, output=subprocess.PIPE, **more)
        self._begun = time.monotonic()
        self._lines: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="ckdist-engine-output").start()

    def _read(self) -> None:
        """Collects the lines about the engine's start."""
        lines, found, job = list[str](), self._lines, self.job
        for data in job.output:
            line = data.decode(errors="replace").rstrip("\n")
            before, _, task = line.partition(READY)
            if task and before in ("", RANK_0):
                found.put([*lines, task])
            if line.startswith(LOST) and job is self.job:
                self.lost = line[len(LOST) :]
            lines.append(line)
            self.news.set()
        self.news.set()


def run(config: ServeConfig, launch: Sequence[str] = (), restarts: int = 0, ranks: int = 0) -> int:
    """Serves until it is stopped. Returns 0, or the exit code of an engine that does not start.

    Args:
        launch: Words before `serve` that start the engine's ranks: `launch`, its flags, and the program.
        restarts: Most restarts within ten minutes. 0: as on one host.
        ranks: Ranks of this host. 0: as its settings need.

    Raises EngineError if the HTTP process fails, or the engine ends again and again.
    """
    listeners, name, given = open_listeners(config), config.alias or model_name(config), config
    if config.model is not None:
        from ckdist.hub.resolve import resolve

        config = dataclasses.replace(config, model=resolve(config.model))
    path = os.fspath(config.model or BUNDLED)
    of_job = given if launch else config  # each host finds the model for itself
    with socket_directory() as directory, RestartedEngine(of_job, name, directory, launch, restarts, ranks) as engine:
        first, metrics, more = listeners
        own = {"restarts": True}
        http = HttpProcess.start(config, engine.address, path, name, first, metrics, more=more, own=own)
        try:
            return _serve(config, listeners, name, engine, http)
        finally:
            http.drain()  # if it still runs: a second signal ends its requests
            http.stop()


def _serve(config: ServeConfig, listeners: Listeners, name: str, engine: RestartedEngine, http: HttpProcess) -> int:
    ending = threading.Event()
    drain = handle_signals(config, listeners, http, ending.set)
    signal.signal(STALE_SIGNAL, lambda *_: engine.note_stuck())
    while http.poll() is None:
        if not engine.is_ready and (lines := engine.start_lines()) is not None:
            http.wait_answering(ANSWERING_SECONDS)
            say_ready(config, listeners, http, name, lines[:-1], lines[-1])
        engine.end_if_stuck()
        if engine.job.has_ended:
            if ending.is_set():
                if engine.job.code:
                    http.drain()  # again: its requests cannot finish
            elif engine.job.code == 0:
                drain()  # somebody has drained the engine
            elif not engine.is_ready:
                return _failed_start(engine)
            else:
                engine.restart(http)
        elif engine.lost:
            if ending.is_set() or not engine.is_ready:
                engine.give_up()
            else:
                engine.restart(http)
        hurries = not engine.is_ready or engine.news.is_set()  # a process ends soon after its output
        engine.news.clear()
        engine.news.wait(START_LOOK_SECONDS if hurries else LOOK_SECONDS)
    if failure := http.failure():
        raise failure
    engine.stop()
    return 0


def _failed_start(engine: RestartedEngine) -> int:
    """Returns the exit code. The engine has written the reason."""
    code = engine.job.code
    if code < 0:
        raise EngineError(f"the engine {engine.job.reason()} before it was ready")
    return code

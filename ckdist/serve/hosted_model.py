"""One of several models of a server: its engine and text workers, which start, restart and end with it."""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import fields, replace
from typing import Any, Literal

from ckdist.errors import CkdistError
from ckdist.serve.engine_job import EngineJob
from ckdist.serve.predicted_memory import PredictedMemory, predict_memory
from ckdist.serve.prefill_file import prefill_all
from ckdist.serve.problems import Problem
from ckdist.serve.requests.adapter_choice import adapter_in
from ckdist.serve.resuming_client import ResumingClient
from ckdist.serve.service import Service
from ckdist.serve.settings import HostedSettings, HttpSettings, ModelSettings

LOOK_SECONDS = 0.05
LAST_WORDS_SECONDS = 3.0  # for an engine that has failed to end by itself
MAX_RESTARTS = 3  # within RESTART_SECONDS
RESTART_SECONDS = 120.0
RETRY_SECONDS = 10.0  # after a load that failed; twice as long after each further one
MAX_RETRY_SECONDS = 600.0
MAX_FAILURES = 10  # more change nothing
SHUTTING_DOWN = "the server is shutting down"

State = Literal["unloaded", "loading", "loaded", "unloading"]
log = logging.getLogger(__name__)


class HostedModel:
    """A model by its name. `begin` loads it, and `unload` ends its processes.

    Attributes:
        state: A model whose engine has crashed is "loading" until it runs again.
        users: HTTP requests that need it.
        used_at: When the last of them began or ended, in seconds of time.monotonic.
        problem: The reason why the last load failed, or None.
        keep_alive: Seconds without a request after which it is unloaded; None: never. A request may change it.
        needs: Bytes that it takes while it is not unloaded; None: not predicted yet.
        restarts: Restarts after crashes, counted from the start of the server.
    """

    def __init__(self, settings: HttpSettings, hosted: HostedSettings, turns: str) -> None:
        self.hosted, self._turns = hosted, turns
        self.client = ResumingClient()
        of_model = {item.name: getattr(hosted, item.name) for item in fields(ModelSettings)}
        own = replace(settings, models=(), **of_model)
        self.service = Service(own, self.client)
        self.problem: str | None = None
        self._set_state("unloaded")
        self.users, self.used_at = 0, time.monotonic()
        self.needs = hosted.memory
        self.keep_alive = hosted.keep_alive
        self.prediction: PredictedMemory | None = None
        self.restarts = 0
        self.job: EngineJob | None = None
        self._refused_until = 0.0  # no request loads it before that
        self._failures = 0  # loads that failed, since the last one that did not
        self._restarted_at: deque[float] = deque()
        self._life: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.hosted.model_name

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may name: those that are loaded now, or with the model."""
        loaded = self.client.adapters
        return self.hosted.adapters if loaded is None else tuple(loaded)

    def adapter(self, name: str) -> str | None:
        """The adapter that NAME or MODEL:NAME stands for. None: this model has no such adapter."""
        return adapter_in(name, (self.name, *self.hosted.aliases), self.adapters)

    @property
    def is_evictable(self) -> bool:
        """True if it may be unloaded for another model."""
        return self.state == "loaded" and not self.users and not self.client.active and not self.hosted.pinned

    async def predict(self) -> int:
        """Returns the bytes that it needs. Raises Problem 503 if it cannot be served."""
        if self.needs is None or (self.problem is not None and self.hosted.memory is None):  # its file may be another
            try:
                self.prediction = await predict_memory(self.hosted.words)
                self.needs = self.prediction.total
            except CkdistError as error:
                self._fail(error)
                raise self._refusal() from None
        return self.needs

    def begin(self) -> None:
        """Starts to load it. `wait` returns when it is loaded."""
        assert self.state == "unloaded", "it is loaded once"
        self._enter_loading()
        self.problem, self.used_at = None, time.monotonic()
        self._life = asyncio.create_task(self._live())

    async def wait(self) -> None:
        """Returns when it is loaded, or has failed to load, which `state` shows."""
        if self._ready is not None:
            await asyncio.shield(self._ready)

    def check_may_load(self) -> None:
        """Raises Problem 503 with the reason if it has failed a short time ago."""
        if self.problem is not None and time.monotonic() < self._refused_until:
            raise self._refusal()

    async def unload(self) -> None:
        """Ends its processes. Its requests, if any, end with 503."""
        if self._life is None:
            return
        self._set_state("unloading")
        self._life.cancel()
        await asyncio.wait((self._life,))
        self.client.lose(SHUTTING_DOWN)
        await self._end()

    def _refusal(self) -> Problem:
        wait = max(1, math.ceil(self._refused_until - time.monotonic()))
        return Problem(503, f"the model {self.name!r} does not run: {self.problem}", retry_after=wait)

    def _fail(self, error: Exception) -> None:
        self.problem = str(error)
        seconds = min(RETRY_SECONDS * 2.0**self._failures, MAX_RETRY_SECONDS)
        self._failures = min(self._failures + 1, MAX_FAILURES)
        self._refused_until = max(self._refused_until, time.monotonic() + seconds)
        log.error("the model %s does not run: %s", self.name, error)

    def _set_state(self, state: State) -> None:
        self.state: State = state
        self.service.rests = state == "unloaded" and self.problem is None  # how the page shows an idle model

    def _enter(self, state: State) -> None:
        """Enters a state that `wait` waits for."""
        self._set_state(state)
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    async def _end(self) -> None:
        self.client.disconnect()
        self.service.tokenizer = None
        self.service.text.close()
        if self.job is not None:
            await self.job.stop()
            self.job = None
        self._life = None
        self._enter("unloaded")

    async def _live(self) -> None:
        """Loads the model and watches it. Ends only if it cannot be served any more."""
        try:
            await _together(self._start_job(), self._start_text())
            while True:
                prefill = asyncio.create_task(self._prefill())
                try:
                    await self._watch(prefill)
                finally:
                    prefill.cancel()
        except CkdistError as error:
            self._fail(error)
            self.client.lose(str(self._refusal()))
            await self._end()

    def _enter_loading(self) -> None:
        self._set_state("loading")
        self.service.prefilling = self.service.settings.prefill_file is not None
        if self._ready is None or self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()

    async def _prefill(self) -> None:
        """Computes the prompts of the model's prefill file, which are in no engine that has just started."""
        if (path := self.service.settings.prefill_file) is not None:
            await prefill_all(self.service, path)
            self.service.prefilling = False
        self._enter("loaded")
        self.used_at, self._failures = time.monotonic(), 0
        log.info("the model %s is loaded", self.name)

    async def _start_text(self) -> None:
        self.service.tokenizer = await self.service.text.start()

    async def _start_job(self) -> None:
        """Starts the engine and waits until it is ready. Raises Problem 503 with the reason if it ends."""
        words = (*self.hosted.words, f"--memory={self.needs or 0}")
        job = self.job = EngineJob(words, self.hosted.cpus, self._turns if self.hosted.takes_turns else "")
        self.client.connect(job.endpoint)
        while self.client.state != "ready":
            if job.has_ended or self.client.state == "failed":
                await job.ended_within(LAST_WORDS_SECONDS)
                raise Problem(503, await asyncio.to_thread(job.reason))
            await asyncio.sleep(LOOK_SECONDS)

    async def _watch(self, prefill: asyncio.Task[None]) -> None:
        """Returns when the engine or the text workers have ended and run again.

        Raises Problem if they cannot, and the error of `prefill`.
        """
        job = self.job
        assert job is not None, "it is loaded"
        runs = lambda: not job.has_ended and self.client.state == "ready" and not self.service.text.ended
        while runs():
            if prefill.done():
                prefill.result()
            await asyncio.sleep(LOOK_SECONDS)
        prefill.cancel()
        self._enter_loading()
        if self.service.text.ended:
            log.error("the tokenizer's process of %s has ended; it is restarted", self.name)
            self.service.tokenizer = None
            await self._start_text()
            return
        await self._restart(job)

    async def _restart(self, job: EngineJob) -> None:
        """Starts the engine again after a crash. Its requests go on."""
        while True:
            state = self.client.state
            await job.ended_within(0.0 if state == "stale" else LAST_WORDS_SECONDS)
            reason = await asyncio.to_thread(job.reason) if job.has_ended else f"its state is {state}"
            await job.stop(0.0)
            self.client.count_crash()
            self.client.disconnect()
            now = time.monotonic()
            while self._restarted_at and now - self._restarted_at[0] > RESTART_SECONDS:
                self._restarted_at.popleft()
            if len(self._restarted_at) >= MAX_RESTARTS:
                most = f"after {MAX_RESTARTS} restarts in {RESTART_SECONDS:g} s it is not restarted again"
                self._refused_until = self._restarted_at[0] + RESTART_SECONDS
                raise Problem(503, f"its engine has ended ({reason}); {most}")
            self._restarted_at.append(now)
            self.restarts += 1
            log.warning("the engine of %s has ended (%s); it is restarted, and its requests go on", self.name, reason)
            with contextlib.suppress(Problem):
                await self._start_job()
                return
            assert self.job is not None, "it was started"
            job = self.job


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Waits for all. After the first error, which it raises, the others are cancelled."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

"""Several models behind one address: finds a request's model, loads it, and unloads others to make room."""

import asyncio
import contextlib
import os
import pathlib
import tempfile
import time
from dataclasses import replace
from typing import Any

from ckdist.engine.core_turns import turns_bytes
from ckdist.engine.socket_directory import remove_dead
from ckdist.serve.accounts import Accounts
from ckdist.serve.hosted_model import HostedModel
from ckdist.serve.problems import Problem
from ckdist.serve.requests.adapter_choice import spellings
from ckdist.serve.requests.request_fields import Fields
from ckdist.serve.response_store import ResponseStore
from ckdist.serve.settings import HostedSettings, HttpSettings

IDLE_LOOK_SECONDS = 0.5
MAX_PULLED = 16  # models that clients may pull
MAX_COPIES = 64  # names that they may give
PASSING_SECONDS = 10.0  # in which requests of loaded models pass a load that waits for their end
LOAD_RETRY_SECONDS = 10  # Retry-After of a request that found no room


class ModelRouter:
    """The table of models. Call `start` first, on a running event loop, and `close` last.

    Loads begin one after another, in the order in which their requests came. So nobody's room is taken by a later one.

    Attributes:
        accounts: The clients of all models.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        remove_dead(pathlib.Path(tempfile.gettempdir()))  # sockets of engines that were killed with their server
        self._turns = os.memfd_create("turns")
        self._rows = list(range(len(settings.models) + MAX_PULLED))  # of the file of turns; those that are free
        os.ftruncate(self._turns, turns_bytes(len(self._rows)))
        self.accounts = Accounts((*settings.api_keys, *settings.file_keys), settings.shared_cache, settings.key_limits)
        self._kept = ResponseStore(settings.store_responses)  # a response may be continued by another model
        self.models: dict[str, HostedModel] = {}
        self._names: dict[str, HostedModel] = {}
        self._row_of: dict[str, int] = {}
        self._copies: set[str] = set()  # names that clients have given
        self._pulled: dict[str, str | None] = {}  # models that clients have pulled: the path if the pull has fetched it
        self.pulling = asyncio.Lock()
        for hosted in settings.models:
            self._add(hosted)
        self._room = asyncio.Lock()
        self._released = asyncio.Event()
        self.draining = False
        self.has_started = True  # a request loads its model
        self._crowded_at: float | None = None  # since when a load waits until another model has no requests

    @property
    def is_crowded(self) -> bool:
        """True if a load waits until another model has no requests."""
        return self._crowded_at is not None

    def start(self) -> None:
        """Begins to load the models that are loaded at the start, and to unload idle ones."""
        self._tasks = [asyncio.create_task(self._load_first()), asyncio.create_task(self._unload_idle())]

    async def close(self) -> None:
        """Ends all models."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(model.unload() for model in self.models.values()))

    def end_now(self) -> None:
        """Kills the jobs that `close` has not ended."""
        for model in self.models.values():
            if model.job is not None:
                model.job.kill()

    @property
    def active(self) -> int:
        """Sequences of all models that run or wait."""
        return sum(model.client.active for model in self.models.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of the models that are loaded or load."""
        return sum(model.needs or 0 for model in self._resident())

    def find(self, name: str | None) -> HostedModel:
        """Returns the model of this name or alias, or with the adapter of this name. None: the only model.

        Raises Problem 404 for an unknown name, and 400 if there is no name and there are several models, or if several
        have an adapter of this name.
        """
        known = ", ".join(sorted(self.models))
        if name is None:
            if len(self.models) == 1:
                return next(iter(self.models.values()))
            raise Problem(400, f"model is missing; this server has {known}", "model")
        for spelled in spellings(name):
            if spelled in self._names:
                return self._names[spelled]
        owners = [model for model in self.models.values() if model.adapter(name) is not None]
        if len(owners) == 1:
            return owners[0]
        if owners:
            whole = " or ".join(f"{model.name}:{model.adapter(name)}" for model in owners[:2])
            message = f"{len(owners)} models have the adapter {name[:200]!r}: name {whole}"
            raise Problem(400, message, "model", "invalid_value")
        known = ", ".join([known, *sorted({name for model in self.models.values() for name in model.adapters})])
        raise Problem(404, f"there is no model {name[:200]!r}; this server has {known}", "model", "model_not_found")

    def current(self) -> HostedModel:
        """Returns the model that was used last, of the loaded ones if there are any: for requests without a model."""
        return max(self.models.values(), key=lambda model: (model.state == "loaded", model.used_at))

    def check_model(self, body: dict[str, Any]) -> None:
        """Raises Problem or RequestError if a request names an unknown model or adapter."""
        self.find(Fields(body).text("model")).service.check_model(body)

    def cannot_load(self, name: Any) -> bool:
        """True if the model of this name has failed to load, or needs more than the memory of all models."""
        model = self._names.get(name) if isinstance(name, str) else None
        return model is not None and (model.problem is not None or (model.needs or 0) > self.settings.models_memory)

    def add_copy(self, model: HostedModel, name: str) -> None:
        """Gives a model a further name. Raises Problem if the name is taken, or there are too many."""
        if name in self._names:
            raise Problem(409, f"there is a model {name!r}: delete it first", "destination")
        if any(other.adapter(name) is not None for other in self.models.values()):
            raise Problem(409, f"there is an adapter {name!r}: choose another name", "destination")
        if len(self._copies) >= MAX_COPIES:
            raise Problem(409, f"there are {MAX_COPIES} copies: delete one first", "destination")
        self._names[name] = model
        self._copies.add(name)
        model.service.copies.add(name)

    def add_pulled(self, name: str, path: str, is_new: bool) -> None:
        """Serves a model that a client has pulled. Raises Problem if there are too many."""
        template = self.settings.pulled
        assert template is not None, "it is allowed"
        if name in self._names:
            return
        if not self._rows:
            raise Problem(409, f"clients have pulled {MAX_PULLED} models: delete one first", "model")
        words = (*template.words, f"--alias={name}", f"--model={path}")
        self._add(replace(template, model_name=name, words=words, model=path))
        self._pulled[name] = path if is_new else None

    async def remove(self, name: str) -> str | None:
        """Removes a copy, or a model that a client has pulled. Returns the path of files to remove, or None.

        Raises Problem 403 for a model that the server was started with, and 409 for one that has requests.
        """
        model = self.find(name)
        if name in self._copies:
            self._copies.discard(name)
            model.service.copies.discard(name)
            del self._names[name]
            return None
        if name not in self._pulled:
            raise Problem(403, f"the server was started with the model {name!r}: remove it there", "model")
        await self.unload(model)
        self._names = {other: one for other, one in self._names.items() if one is not model}
        self._copies &= self._names.keys()
        del self.models[name]
        self._rows.append(self._row_of.pop(name))
        return self._pulled.pop(name)

    def _add(self, hosted: HostedSettings) -> None:
        row = self._row_of[hosted.model_name] = self._rows.pop(0)
        path = f"/proc/{os.getpid()}/fd/{self._turns}"  # the engines open it, and it leaves nothing behind
        model = self.models[hosted.model_name] = HostedModel(self.settings, hosted, f"{path}:{row}")
        model.service.kept, model.service.accounts = self._kept, self.accounts
        self._names |= dict.fromkeys((model.name, *hosted.aliases), model)

    async def load(self, hold: "Hold", waits: bool = True) -> None:
        """Returns when the model is loaded and held. Raises Problem 503 if that fails or takes longer than --timeout.

        `waits`: as in `begin`.
        """
        model = hold.model
        try:
            await asyncio.wait_for(self._load(hold, waits), self.settings.timeout)
        except asyncio.TimeoutError:
            message = f"the model {model.name!r} was not loaded within {self.settings.timeout:g} seconds (--timeout)"
            raise Problem(503, message, retry_after=LOAD_RETRY_SECONDS) from None

    def hold(self, model: HostedModel) -> "Hold":
        """Returns a request's use of a model, which `load` begins."""
        return Hold(model, self._released)

    async def begin(self, model: HostedModel, waits: bool, is_order: bool = False) -> None:
        """Makes room and begins to load the model, if it is not loaded.

        `waits`: without room, wait for requests of other models to end, and let no other model load meanwhile.
        `is_order`: load a model that has just failed, too.
        """
        async with self._room:
            if self.draining:
                raise Problem(503, "the server is shutting down")
            if model.state == "unloaded":
                if not is_order:
                    model.check_may_load()
                needs = await model.predict()
                try:
                    await self._make_room(model, needs, waits)
                finally:
                    self._crowded_at = None
                model.begin()

    async def unload(self, model: HostedModel) -> None:
        """Unloads a model without requests. Raises Problem 409 if it has some."""
        async with self._room:
            if model.users or model.client.active:
                count = max(model.users, model.client.active)
                have = f"{count} request{'s' * (count > 1)}"
                raise Problem(409, f"the model {model.name!r} has {have}; try again later")
            await model.unload()

    async def _load(self, hold: "Hold", waits: bool) -> None:
        """A request that waits for its turn to load holds nothing: the loads before it may unload its model."""
        model = hold.model
        if model.state == "loaded" and self._gives_way(model):
            await self.begin(model, waits)
        while model.state != "loaded":
            if model.state in ("unloaded", "unloading"):
                hold.release()
                await self.begin(model, waits)
            hold.take()
            await model.wait()
            if model.state == "unloaded":
                model.check_may_load()
        hold.take()

    def _gives_way(self, model: HostedModel) -> bool:
        """True if a request of a loaded model comes after a load that waits for room for PASSING_SECONDS."""
        crowded_at = self._crowded_at
        return not model.hosted.pinned and crowded_at is not None and time.monotonic() - crowded_at > PASSING_SECONDS

    async def _make_room(self, model: HostedModel, needs: int, waits: bool) -> None:
        """Unloads models until there is room for one more. The least recently used one goes first."""
        limit = self.settings.models_memory
        pinned = sum(one.needs or 0 for one in self._resident() if one.hosted.pinned)
        if needs > limit - pinned:
            prediction = model.prediction
            remedy = "lower its memory" if prediction is None else prediction.remedy(limit - pinned)
            held = f", of which pinned models hold {_size(pinned)}" if pinned else ""
            told = f"the model {model.name!r} needs {_size(needs)}, and all models may take {_size(limit)}{held}"
            message = f"{told}: {remedy}, or raise --models-memory"
            raise Problem(503, message, retry_after=LOAD_RETRY_SECONDS)
        while not self._has_room(needs):
            self._released.clear()
            idle = [one for one in self._resident() if one.is_evictable]
            if idle:
                await min(idle, key=lambda one: one.used_at).unload()
            elif waits:
                self._crowded_at = self._crowded_at or time.monotonic()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._released.wait(), IDLE_LOOK_SECONDS)
            else:
                free = _size(limit - self.used_bytes)
                count = len(self._resident())
                models = f"{count} model{'s are' if count != 1 else ' is'}"
                message = f"{models} loaded and {free} are free, of {_size(limit)}; {model.name!r} needs {_size(needs)}"
                raise Problem(503, message, retry_after=LOAD_RETRY_SECONDS)

    def _has_room(self, needs: int) -> bool:
        most = self.settings.models_max
        counts = most is None or len(self._resident()) < most
        return counts and self.used_bytes + needs <= self.settings.models_memory

    def _resident(self) -> list[HostedModel]:
        return [model for model in self.models.values() if model.state != "unloaded"]

    async def _load_first(self) -> None:
        for model in list(self.models.values()):
            if model.hosted.at_start:
                with contextlib.suppress(Problem):  # `problem` has it, and the log
                    await self.begin(model, waits=False, is_order=True)
                    await model.wait()

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_LOOK_SECONDS)
            for model in list(self.models.values()):
                limit = model.keep_alive
                if limit is not None and model.is_evictable and time.monotonic() - model.used_at >= limit:
                    async with self._room:
                        if model.is_evictable:
                            await model.unload()


class Hold:
    """One request's use of a model, which stays loaded from `take` to `release`. Second calls of these do nothing."""

    def __init__(self, model: HostedModel, released: asyncio.Event) -> None:
        self.model, self._released = model, released
        self._is_held = False
        self.begun = time.monotonic()

    def take(self) -> None:
        """Begins the use."""
        if not self._is_held:
            self._is_held = True
            self.model.users += 1
            self.model.used_at = time.monotonic()

    def release(self) -> None:
        """Ends the use."""
        if self._is_held:
            self._is_held = False
            self.model.users -= 1
            self.model.used_at = time.monotonic()
            self._released.set()


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"

"""Requests of several models that take turns in room for one: nobody waits for ever."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from ckdist.serve import model_router
from ckdist.serve.model_router import ModelRouter


class FakeModel:
    """A hosted model that loads in two turns of the event loop."""

    def __init__(self, name):
        self.name, self.state, self.users, self.used_at, self.needs = name, "unloaded", 0, 0.0, 1
        self.hosted, self.client = SimpleNamespace(pinned=False), SimpleNamespace(active=0)
        self.loads = 0

    @property
    def is_evictable(self):
        return self.state == "loaded" and not self.users

    async def predict(self):
        return self.needs

    def check_may_load(self):
        pass

    def begin(self):
        assert self.state == "unloaded"
        self.state = "loading"

    async def wait(self):
        await asyncio.sleep(0)
        if self.state == "loading":
            self.state, self.loads = "loaded", self.loads + 1

    async def unload(self):
        self.state = "unloading"
        await asyncio.sleep(0)
        self.state = "unloaded"


@pytest.fixture
def router(monkeypatch):
    monkeypatch.setattr(model_router, "IDLE_LOOK_SECONDS", 0.01)
    settings = SimpleNamespace(models=(), models_max=1, models_memory=10, timeout=5.0)
    more = {"api_keys": (), "file_keys": (), "shared_cache": False, "key_limits": None, "store_responses": 0.0}
    settings.__dict__.update(more)
    return lambda: ModelRouter(settings)


async def ask(router, model):
    hold = router.hold(model)
    try:
        await router.load(hold)
        assert model.state == "loaded" and model.users
        await asyncio.sleep(0)
        assert model.state == "loaded"
    finally:
        hold.release()


def test_requests_that_wait_for_a_load_do_not_keep_their_model(router):
    async def run():
        owner = router()
        one, two = owner.models["one"], owner.models["two"] = FakeModel("one"), FakeModel("two")
        await asyncio.gather(*(ask(owner, model) for model in (one, two, one, two, one, one, two)))
        assert one.users == two.users == 0 and one.loads and two.loads

    asyncio.run(run())


def test_a_busy_model_gives_way_after_a_while(router, monkeypatch):
    monkeypatch.setattr(model_router, "PASSING_SECONDS", 0.02)

    async def busy(owner, model, taken, following):
        """Ends its use when the next request has begun, if that does not wait."""
        hold, begun = owner.hold(model), asyncio.Event()
        await owner.load(hold)
        taken.set()
        following.append(asyncio.create_task(busy(owner, model, begun, following)))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(begun.wait(), 0.1)
        hold.release()

    async def run():
        owner = router()
        one, two = owner.models["one"], owner.models["two"] = FakeModel("one"), FakeModel("two")
        tasks, begun = [], asyncio.Event()
        tasks.append(asyncio.create_task(busy(owner, one, begun, tasks)))
        await begun.wait()
        await ask(owner, two)
        assert len(tasks) > 2
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(run())

"""The HTTP process's end of the socket to rank 0, where rank 0 does not read."""

import asyncio

import pytest

from ckdist.engine.messages import Submit, pack_tokens
from ckdist.engine.sampling_params import SamplingParams
from ckdist.serve import engine_client
from ckdist.serve.engine_client import EngineClient, new_id
from ckdist.serve.problems import Problem
from tests.support.fake_engine import FakeEngine
from tests.support.served import VOCAB


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_a_full_queue_is_503_and_a_drain_is_said_once_there_is_room(tmp_path, monkeypatch):
    """What nobody reads is bounded; an engine that comes back on the same socket hears of the drain all the same."""
    monkeypatch.setattr(engine_client, "MAX_UNSENT", 5)
    endpoint = f"ipc://{tmp_path}/engine"

    async def scenario():
        client = EngineClient(endpoint, stale_seconds=60)
        with FakeEngine(endpoint, VOCAB):
            client.start()
            await asyncio.wait_for(until(lambda: client.state == "ready"), 10)
        try:
            with client.generation() as generation:
                with pytest.raises(Problem, match="has not read the last 5 messages") as refused:
                    for number in range(1000):
                        generation.submit(number, Submit(new_id(), pack_tokens([5, 6]), SamplingParams(max_tokens=3)))
                assert refused.value.status == 503 and client.active < 1000
                client.drain()
                with FakeEngine(endpoint, VOCAB) as engine:
                    await asyncio.wait_for(until(lambda: engine.drained), 10)
        finally:
            client.close()

    asyncio.run(scenario())

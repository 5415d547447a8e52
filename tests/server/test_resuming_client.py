"""Requests that outlive their engine: they go on with the next one, and not for ever."""

import asyncio

import pytest

from ckdist.engine.messages import Failure, pack_tokens, unpack_tokens
from ckdist.engine.sampling_params import SamplingParams
from ckdist.serve.problems import Problem
from ckdist.serve.resuming_client import MAX_CRASHES, ResumingClient
from tests.server.test_engine_client import until
from tests.support.fake_engine import FakeEngine
from tests.support.served import VOCAB

PROMPT = pack_tokens([5, 6, 7])


async def crash_at(client, endpoint, condition, limit: float = 10) -> dict:
    """Connects to an engine until `condition`; then it ends. Returns the last request that it got."""
    with FakeEngine(endpoint, VOCAB) as engine:
        engine.delay = 0.02
        client.connect(endpoint)
        await asyncio.wait_for(until(lambda: engine.submitted and condition()), limit)
        client.count_crash()
        client.disconnect()
        return engine.submitted[-1]


@pytest.mark.parametrize("mirostat", [0, 2])
def test_goes_on_after_its_tokens(tmp_path, mirostat):
    async def scenario():
        client = ResumingClient()
        with client.generation() as generation:
            generation.submit(0, PROMPT, SamplingParams(max_tokens=40, mirostat=mirostat, prompt_logprobs=1))
            tokens: list[int] = []

            async def read():
                while generation.running:
                    for _, message in await generation.next():
                        tokens.extend(message.tokens)

            reading = asyncio.create_task(read())
            first = await crash_at(client, f"ipc://{tmp_path}/a", lambda: len(tokens) >= 3)
            seen = list(tokens)
            second = await crash_at(client, f"ipc://{tmp_path}/b", lambda: len(tokens) > len(seen) or mirostat)
            client._handle(Failure(first["id"], "a rank died", None, 503, ends_engine=True))
            assert client.unavailable() is None and not reading.done() and client.active == 1
            reading.cancel()
        assert first["sampling"]["seed"] == second["sampling"]["seed"] is not None
        if mirostat:  # its state does not follow from the tokens, so all are drawn again
            assert "drawn" not in second or not second["drawn"]
        else:
            assert list(unpack_tokens(second["drawn"]))[: len(seen)] == seen
            assert second["sampling"].get("prompt_logprobs") is None

    asyncio.run(scenario())


def test_a_request_of_three_crashes_is_refused_and_others_go_on(tmp_path):
    async def scenario():
        client = ResumingClient()
        with client.generation() as poison, client.generation() as later:
            poison.submit(0, PROMPT, SamplingParams(max_tokens=200))
            for crash in range(MAX_CRASHES):
                if crash == 1:
                    later.submit(0, PROMPT, SamplingParams(max_tokens=200))
                await crash_at(client, f"ipc://{tmp_path}/{crash}", lambda: True)
            with pytest.raises(Problem, match="was running in 3 crashes") as refused:
                while True:
                    await poison.next()
            assert refused.value.status == 500 and client.active == 1 and later.running == 1

    asyncio.run(scenario())

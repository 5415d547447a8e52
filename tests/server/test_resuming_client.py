"""Requests that outlive their engine: they go on with the next one, and not for ever."""

import asyncio
import contextlib

import pytest

from ckdist.engine.messages import Done, Failure, LoadAdapter, Status, Submit, pack_tokens, unpack_tokens
from ckdist.engine.sampling_params import SamplingParams
from ckdist.serve.accounts import Account
from ckdist.serve.api_keys import KeyLimits
from ckdist.serve.engine_client import new_id
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
        try:
            await asyncio.wait_for(until(lambda: engine.submitted and condition()), limit)
        finally:
            client.count_crash()
            client.disconnect()
        return engine.submitted[-1]


@pytest.mark.parametrize("mirostat", [0, 2])
def test_goes_on_after_its_tokens(tmp_path, mirostat):
    async def scenario():
        client = ResumingClient()
        with client.generation() as generation:
            generation.submit(
                0, Submit(new_id(), PROMPT, SamplingParams(max_tokens=40, mirostat=mirostat, prompt_logprobs=1))
            )
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


def test_the_next_engine_gets_all_requests_together(tmp_path):
    async def scenario():
        client, endpoint = ResumingClient(), f"ipc://{tmp_path}/b"
        with client.generation() as generation:
            for index in range(3):
                generation.submit(index, Submit(new_id(), PROMPT, SamplingParams(max_tokens=200)))
            await crash_at(client, f"ipc://{tmp_path}/a", lambda: True)
            with FakeEngine(endpoint, VOCAB) as engine:
                client.connect(endpoint)
                await asyncio.wait_for(until(lambda: len(engine.submitted) == 3), 10)
                client.disconnect()
            assert 3 in engine.groups and client.resumed == 6, "by each engine"

    asyncio.run(scenario())


def test_requests_wait_for_the_facts_of_the_first_engine_and_keep_them(tmp_path):
    """An engine that loads sends its name alone: the context length comes when it is ready."""

    async def scenario():
        client = ResumingClient(f"ipc://{tmp_path}/engine")
        loading, facts = Status("loading", model={"id": "m"}), {"id": "m", "context_length": 64}
        client._handle(loading)
        assert client.unavailable().status == 503
        client._handle(Status("ready", model=facts))
        client._handle(loading)
        assert client.unavailable() is None and client.model == facts

    asyncio.run(scenario())


def test_a_held_request_is_sent_to_the_engine_of_its_own_model(tmp_path):
    """A client may run one sequence at a time, of all models together."""

    async def scenario():
        account = Account("a", limits=KeyLimits(max_running=1))
        first, second = f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"
        with FakeEngine(first, VOCAB) as one, FakeEngine(second, VOCAB) as other, contextlib.ExitStack() as held:
            one.delay = 0.05
            clients = ResumingClient(), ResumingClient()
            for client, endpoint in zip(clients, (first, second), strict=True):
                held.callback(client.disconnect)
                client.connect(endpoint)
            running, waiting = (held.enter_context(client.generation(account)) for client in clients)
            running.submit(0, Submit(new_id(), PROMPT, SamplingParams(max_tokens=100)))
            waiting.submit(0, Submit(new_id(), PROMPT, SamplingParams(max_tokens=3)))
            await asyncio.wait_for(until(lambda: one.submitted), 10)
            assert account.running == 1 and account.sequences == 2 and not other.submitted
            running.abort(0)
            await asyncio.wait_for(until(lambda: other.submitted and not waiting.running), 10)
            assert account.sequences == 0 and len(one.submitted) == len(other.submitted) == 1

    asyncio.run(scenario())


def test_a_request_of_three_crashes_is_refused_and_others_go_on(tmp_path):
    async def scenario():
        client = ResumingClient()
        with client.generation() as poison, client.generation() as later:
            poison.submit(0, Submit(new_id(), PROMPT, SamplingParams(max_tokens=200)))
            for crash in range(MAX_CRASHES):
                if crash == 1:
                    later.submit(0, Submit(new_id(), PROMPT, SamplingParams(max_tokens=200)))
                await crash_at(client, f"ipc://{tmp_path}/{crash}", lambda: True)
            with pytest.raises(Problem, match="was running in 3 crashes") as refused:
                while True:
                    await poison.next()
            assert refused.value.status == 500 and client.active == 1 and later.running == 1

    asyncio.run(scenario())


def test_a_request_is_not_continued_with_another_adapter_of_its_name(tmp_path):
    """The next engine has the adapters of the start, without those that clients have loaded in their place."""

    async def scenario():
        client = ResumingClient()
        with client.generation() as generation:
            generation.submit(0, Submit(new_id(), PROMPT, SamplingParams(max_tokens=200), adapters=(("x", 1.0),)))

            async def load():
                loading = asyncio.create_task(client.call(LoadAdapter("id", "x", "/folder")))
                await asyncio.sleep(0)
                client._handle(Done("id"))
                await loading

            loads = []

            def loaded():
                if not loads:
                    loads.append(asyncio.create_task(load()))
                return loads[0].done() and not loads[0].result()

            await crash_at(client, f"ipc://{tmp_path}/a", loaded)
            with pytest.raises(Problem, match="'x' must be loaded again"):
                while True:
                    await generation.next()

    asyncio.run(scenario())

"""What the HTTP application's paths work with, without a server."""

import asyncio

import pytest

from ckdist.serve.answer import EventStream
from ckdist.serve.chat_answer import ChatAnswer
from ckdist.serve.engine_client import EngineClient
from ckdist.serve.problems import Problem
from ckdist.serve.service import Service
from ckdist.serve.settings import HttpSettings


def test_a_request_whose_tokenizer_has_gone_meanwhile_is_told_that_it_loads():
    settings = HttpSettings(endpoint="ipc:///nowhere", model="m", model_name="m", listener=-1, parent=1)
    service = Service(settings, EngineClient(settings.endpoint))
    with pytest.raises(Problem, match="the tokenizer is loading") as found:
        asyncio.run(service.answer(None, None, ChatAnswer))
    assert found.value.status == 503


def test_a_stream_without_events_is_an_answer_too():
    """As that of the machine, when the server drains."""
    sent = []

    async def none():
        """No events."""
        for event in ():
            yield event

    async def send(message):
        """Keeps what is sent."""
        sent.append(message)

    async def ask():
        """One request."""
        stream = EventStream(none(), lambda: 0.0, timeout=1e9, stall_timeout=1e9, end=b"end")
        await stream({"type": "http", "path": "/v1/machine"}, asyncio.Event().wait, send)

    asyncio.run(ask())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 200 and sent[1]["body"] == b"end"

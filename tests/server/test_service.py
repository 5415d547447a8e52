"""What the HTTP application's paths work with, without a server."""

import asyncio

import pytest

from ckdist.serve.chat import ChatAnswer
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

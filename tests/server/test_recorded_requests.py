"""Requests as real clients send them, recorded or written down from their sources: all are answered, and every field is
known.

`recorded_requests.json` maps a client's name to the path and body of a request.
"""

import json

import httpx
import pytest

from tests.support.paths import TESTS
from tests.support.served import serving

REQUESTS = json.loads((TESTS / "support" / "recorded_requests.json").read_text())


@pytest.fixture(scope="module")
def http():
    with (
        serving({"context_length": 1024}, strict_fields=True) as (_, process),
        httpx.Client(base_url=process.url, timeout=20) as made,
    ):
        yield made


@pytest.mark.parametrize("name", REQUESTS)
def test_clients_are_understood(http, name):
    request = REQUESTS[name]
    answer = http.post(request["path"], json=request["body"])
    assert answer.status_code == 200, answer.text
    assert ("text/event-stream" in answer.headers["content-type"]) == bool(request["body"].get("stream"))
    assert '"error":{' not in answer.text

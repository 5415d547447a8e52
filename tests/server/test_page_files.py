"""The page's files over the real HTTP process: who gets them, with which headers, and what the machine's events say."""

import json
import re
import time

import httpx
import pytest

from ckdist.serve.machine_events import MAX_WATCHERS
from ckdist.serve.paths.page import FOLDER, static_files
from tests.support.served import serving

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def served():
    with serving(api_key="secret") as pair:
        yield pair


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served[1].url, timeout=10) as made:
        yield made


def events_of(http, count):
    """The first events of the machine's stream."""
    with http.stream("GET", "/v1/machine", headers=KEY) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line)
        return [json.loads(next(lines).removeprefix("data: ")) for _ in range(count)]


def test_the_page_is_small_and_whole():
    assert sum(len(file.body) for file in static_files().values()) < 150_000
    assert {path.name for path in FOLDER.iterdir()} == set(static_files())
    named = re.compile(r'(?:from "\./|(?:src|href)="page/)([\w.]+)"')
    for name, file in static_files().items():
        for other in named.findall(file.body.decode()):
            assert other in static_files(), f"{name} asks for {other}"


def test_nothing_in_the_page_is_inline_or_makes_html():
    for name, file in static_files().items():
        text = file.body.decode()
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", " style="):
            assert sink not in text, f"{name} has {sink}"
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=", text), name


def test_files_need_no_key_and_let_nothing_else_in(http):
    for name in ("/", "/page/app.js", "/page/frame.css", "/page/icon.svg"):
        answer = http.get(name)
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200 and "secret" not in answer.text
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert http.get(name, headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    assert http.head("/").headers["content-type"] == "text/html; charset=utf-8"
    for name in ("/page/../static_files.py", "/page/%2e%2e/settings.py", "/page/none.js", "/page/"):
        assert http.get(name).status_code in (401, 404), name
    assert http.get("/v1/models").status_code == http.get("/v1/machine").status_code == 401


def test_no_webui_leaves_the_page_out():
    with serving(no_webui=True) as (_, process), httpx.Client(base_url=process.url) as http:
        assert http.get("/").status_code == http.get("/page/app.js").status_code == 404
        assert http.get("/v1/models").status_code == 200


def test_events_tell_the_state_and_the_numbers(served, http):
    served[0].ranks = [{"rank": 0, "steps_total": 4}]
    deadline = time.monotonic() + 10
    while (last := events_of(http, 1)[0])["ranks"] != served[0].ranks:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert last["state"] == "ready" and last["model"]["id"] == "bytes" and last["most_running"] == 8
    assert last["stats"]["requests_waiting"] == 3 and "step_seconds_le_0.5" not in last["stats"]
    begun = time.monotonic()
    first, second, third = events_of(http, 3)
    assert 0.8 < time.monotonic() - begun < 3 and first["clock"] < second["clock"] < third["clock"]
    assert served[0].watched > 0


def test_lookers_are_bounded_and_do_not_hold_up_a_drain(http):
    with serving(api_key="secret") as (_, process):
        clients = [httpx.Client(base_url=process.url, timeout=10) for _ in range(MAX_WATCHERS + 1)]
        streams = [client.send(client.build_request("GET", "/v1/machine", headers=KEY), stream=True)
                   for client in clients]  # fmt: skip
        assert sorted(stream.status_code for stream in streams) == [200] * MAX_WATCHERS + [429]
        begun = time.monotonic()
        process.stop()
        assert time.monotonic() - begun < 5
        for client in clients:
            client.close()

"""`ckdist status`: the figures between two events, a real server's table, and servers that are none."""

import json
import re

import pytest

from ckdist.cli.arguments import parse_arguments
from ckdist.cli.server_status import facts, machine_events, run
from ckdist.config.status_config import StatusConfig
from ckdist.errors import ConfigError, EngineError
from tests.support.local_server import running
from tests.support.served import serving


def event(clock, **stats):
    rank = {"rank": 0, "host": "h", "cpus": "0-3", "threads": 4, "bandwidth": 8e9, "weights_bytes": 5, "cache_bytes": 6}
    work = {name: clock * value for name, value in [("steps_total", 10), ("step_seconds_total", 0.5)]}
    work |= {"wait_seconds_total": clock * 0.25, "decode_seconds_total": clock, "decode_read_bytes_total": clock * 4e9}
    return {"clock": clock, "state": "ready", "model": {"id": "m"}, "stats": stats, "ranks": [{**rank, **work}]}


def test_rates_are_those_between_two_events():
    before = event(2.0, generated_tokens_total=5, prefill_by_token_tokens_total=1, cached_tokens_total=1)
    now = event(4.0, generated_tokens_total=25, prefill_by_token_tokens_total=101, cached_tokens_total=50, blocks=8)
    found = facts(before, {**now, "stats": {**now["stats"], "prompt_tokens_total": 100}})
    assert found["generated_tokens_per_second"] == 10 and found["prompt_tokens_per_second"] == 50
    assert found["cached_share"] == 0.5 and found["blocks"] == 8
    (rank,) = found["ranks"]
    assert (rank["steps_per_second"], rank["seconds_per_step"], rank["wait_share"]) == (10, 0.05, 0.5)
    assert rank["decode_bytes_per_second"] == 4e9


def test_a_server_is_shown_once_and_as_json(capsys):
    with serving() as (_, http):
        assert run(parse_arguments(StatusConfig, [http.url, "--once"], "x")) == 0
        assert "bytes" in (shown := capsys.readouterr().out) and "ready" in shown
        assert run(parse_arguments(StatusConfig, [http.url + "/v1", "--json"], "x")) == 0
        assert json.loads(capsys.readouterr().out)["most_running"] == 8


@pytest.mark.parametrize(
    "body",
    [
        b"data: 3\n",
        b'data: {"ranks": [], "clock": "x", "stats": {}}\n',
        b'data: {"ranks": [], "clock": 1, "stats": {}, "model": [1]}\n',
        b'data: {"ranks": [], "clock": 1, "stats": {"blocks": NaN}}\n',
        b'data: {"ranks": [], "clock": 1, "stats": {}, "most_running": "\\u001b[2J"}\n',
        b'data: {"ranks": [{"rank": []}], "clock": 1, "stats": {}}\n',
        b'data: {"ranks": [{"bandwidth": 1' + b"0" * 400 + b'}], "clock": 1, "stats": {}}\n',
        b"data: {\n",
        b"data: " + b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_state_is_one_line(body):
    with running(lambda path, headers: (200, {}, body)) as server, pytest.raises(EngineError, match="no state of"):
        next(machine_events(server.url, "key"))


def test_no_server_and_no_url():
    with pytest.raises(EngineError, match=r"127.0.0.1:9 does not answer .*: is a server running there\?"):
        run(StatusConfig(url="http://127.0.0.1:9", once=True))
    for url in ("localhost", "http://[", "http://h:99999", "http://h:x"):
        with pytest.raises(ConfigError, match=rf"the URL \({re.escape(url)}\) must be http://HOST:PORT"):
            StatusConfig(url=url)

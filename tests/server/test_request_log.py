"""The line that each request leaves in the log."""

import asyncio
import contextlib
import json
import logging
import shutil

import httpx
import pytest

from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError
from ckdist.serve.addresses import listen
from ckdist.serve.process import HttpProcess
from ckdist.serve.request_log import LogFile
from tests.support.served import serving, wait_for


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_leaves_one_line_with_tokens_and_times(tmp_path):
    log = tmp_path / "log"
    with serving(log_file=str(log), log_format="json") as (_, http):
        body = {"prompt": "ab secret", "max_tokens": 4}
        answers = [
            httpx.post(f"{http.url}/v1/completions", json=body, headers={"X-Request-Id": "mine.1"}),
            httpx.post(f"{http.url}/v1/completions", json={**body, "stream": True}, headers={"X-Request-Id": "a\tb"}),
            httpx.post(f"{http.url}/v1/embeddings", json={"input": "ab"}),
            httpx.get(f"{http.url}/health"),
        ]
        wait_for(lambda: len(lines_of(log)) == 3)
    whole, streamed, embedded = lines_of(log)
    assert answers[0].headers["x-request-id"] == whole["request_id"] == "mine.1"
    assert answers[1].headers["x-request-id"] == streamed["request_id"] != "a\tb"
    for line in (whole, streamed):
        assert (line["method"], line["path"], line["status"], line["model"]) == (
            "POST",
            "/v1/completions",
            200,
            "bytes",
        )
        assert (line["prompt_tokens"], line["cached_tokens"], line["sim"], line["f_keep"]) == (9, 2, 0.222, 0.25)
        assert (line["generated_tokens"], line["finish"], line["client"], line["key"]) == (
            4,
            "length",
            "127.0.0.1",
            "-",
        )
        assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert embedded["prompt_tokens"] == 2
    assert "secret" not in log.read_text()


def test_refusals_leave_a_line_each_and_no_more(tmp_path):
    log = tmp_path / "log"

    async def ask(url):
        limits = httpx.Limits(max_connections=20)
        async with httpx.AsyncClient(limits=limits, timeout=60) as client:
            bad = [client.post(f"{url}/v1/completions", json={"prompt": "a", "n": -1}) for _ in range(60)]
            strangers = [client.get(f"{url}/v1/models/{i}%0afake") for i in range(60)]
            return [answer.status_code for answer in await asyncio.gather(*bad, *strangers)]

    with serving(log_file=str(log), api_key="key", no_webui=True) as (_, http):
        statuses = asyncio.run(ask(http.url))
    assert statuses == [401] * 120
    lines = log.read_text().splitlines()
    assert len(lines) == 120
    assert all("status=401" in line and "error=invalid_api_key" in line and "key=-" in line for line in lines)
    assert any('path="/v1/models/7\\nfake"' in line for line in lines), "control characters are escaped"


def test_the_log_names_the_faulty_field_and_not_its_value(tmp_path):
    log = tmp_path / "log"
    with serving(log_file=str(log)) as (_, http):
        httpx.post(f"{http.url}/v1/completions", json={"prompt": "ab", "temperature": "secret"})
        wait_for(log.read_text)
    assert "status=400 error=invalid_type field=temperature" in log.read_text()
    assert "secret" not in log.read_text()


def test_prompts_are_logged_on_demand_and_requests_not_at_all(tmp_path):
    log = tmp_path / "log"
    with serving(log_file=str(log), log_prompts=True) as (_, http):
        httpx.post(f"{http.url}/v1/completions", json={"prompt": "ab", "max_tokens": 1})
        wait_for(log.read_text)
        assert "prompt=ab" in log.read_text()
        log.rename(tmp_path / "rotated")
        httpx.post(f"{http.url}/v1/completions", json={"prompt": "cd", "max_tokens": 1})
        wait_for(log.exists)
    with serving(log_file=str(tmp_path / "none"), no_log_requests=True) as (_, http):
        httpx.post(f"{http.url}/v1/completions", json={"prompt": "ab", "max_tokens": 1})
    assert (tmp_path / "none").read_text() == ""


def test_a_log_file_that_cannot_be_written_is_the_users_mistake(tmp_path):
    with listen("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        HttpProcess.start(ServeConfig(log_file=str(tmp_path)), "ipc://none", str(tmp_path), "m", listener)


def test_a_full_disk_costs_one_line_and_no_request(tmp_path, capfd):
    record = logging.makeLogRecord({"msg": "a"})
    gone = tmp_path / "folder" / "log"
    gone.parent.mkdir()
    logs = [LogFile("/dev/full"), LogFile(str(gone))]
    shutil.rmtree(gone.parent)
    for log in logs * 2:
        log.emit(record)
    full, absent = capfd.readouterr().err.splitlines()
    assert full == "the log /dev/full cannot be written: No space left on device"
    assert absent == f"the log {gone} cannot be written: No such file or directory"
    with contextlib.suppress(OSError):
        logs[0].close()

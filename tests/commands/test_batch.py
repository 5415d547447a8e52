"""`ckdist batch`: answers equal those of the server, stops and continues, and files that are wrong."""

import json
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from ckdist.config.batch_config import BatchConfig
from ckdist.errors import ConfigError
from ckdist.serve.batch_lines import BadLinesError, in_order, read_lines
from ckdist.serve.batch_output import BatchOutput
from ckdist.serve.logprob_rows import row_type
from tests.support.launcher import environment

CHAT = "/v1/chat/completions"


def line(number, url="/v1/completions", **body):
    prompt = {"messages": [{"role": "user", "content": f"q{number}"}]} if url == CHAT else {"prompt": f"def f{number}("}
    return {
        "custom_id": f"id-{number}",
        "method": "POST",
        "url": url,
        "body": {**prompt, "max_tokens": 4, "temperature": 0, **body},
    }


def write(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def batch(folder, *flags, **more):
    words = [
        sys.executable,
        "-m",
        "ckdist.cli.main",
        "batch",
        "-i",
        str(folder / "in.jsonl"),
        "-o",
        str(folder / "out.jsonl"),
    ]
    words += ["-t", "1", "-c", "256", "-np", "4", *flags]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment(), cwd=folder, **more)


def results(path):
    return {one["custom_id"]: one for one in map(json.loads, path.read_text().splitlines())}


def test_a_batch_answers_stops_and_goes_on(tmp_path):
    lines = [line(number, CHAT if number % 2 else "/v1/completions") for number in range(12)]
    lines.append(line(12, prompt="x" * 5000))
    write(tmp_path / "in.jsonl", lines)
    done = batch(tmp_path, "--logprobs", "2")
    assert done.returncode == 1 and "12 answers in" in done.stdout and "1 errors in" in done.stdout, done.stderr
    whole = results(tmp_path / "out.jsonl")
    (failed,) = results(tmp_path / "out.errors.jsonl").values()
    assert failed["response"]["status_code"] == 400 and failed["custom_id"] == "id-12"
    rows = np.memmap(tmp_path / "out.jsonl.logprobs", dtype=row_type(2), mode="r")
    choice = whole["id-0"]["response"]["body"]["choices"][0]
    first, count = choice["logprob_rows"]
    own = rows[first : first + count]
    assert count == 4 and (own["top_tokens"][:, 0] == own["token"]).all(), "greedy tokens are the most likely ones"
    assert np.allclose(own["top_logprobs"][:, 0], own["logprob"]) and (np.diff(own["top_logprobs"]) <= 0).all()

    data = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_bytes(b"".join(data[:5]) + data[5][:20])
    again = batch(tmp_path, "--logprobs", "2")
    assert again.returncode == 1 and "12 answers in" in again.stdout, again.stderr
    texts = lambda found: {name: one["response"]["body"]["choices"][0].get("text") for name, one in found.items()}
    assert texts(results(tmp_path / "out.jsonl")) == texts(whole)
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 12


def test_killed_at_any_moment_each_line_has_one_result(tmp_path):
    write(tmp_path / "in.jsonl", [line(number) for number in range(60)])
    words = [
        sys.executable,
        "-m",
        "ckdist.cli.main",
        "batch",
        "-i",
        "in.jsonl",
        "-o",
        "out.jsonl",
        "-t",
        "1",
        "-c",
        "256",
    ]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=environment(), start_new_session=True, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").stat().st_size:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert batch(tmp_path).returncode == 0
    names = [json.loads(one)["custom_id"] for one in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sorted(names) == sorted(f"id-{number}" for number in range(60))


def check(tmp_path, lines, **more):
    with open(write(tmp_path / "in.jsonl", lines), "rb") as file:
        return read_lines(file, "in.jsonl", 100, strict=False, **more)


def test_bad_lines_are_all_named_before_anything_runs(tmp_path):
    bad = [
        line(0), {**line(1), "custom_id": 3}, {**line(2), "url": "/v1/images"}, {**line(3), "body": []},
        line(4, stream=True), {**line(5), "method": "GET"}, line(0), line(7, prompt=""), line(8, best_two=1, echo=[]),
        line(9, post_sampling_probs=True),
    ]  # fmt: skip
    with pytest.raises(BadLinesError) as found:
        check(tmp_path, bad)
    assert [one.number for one in found.value.lines] == [2, 3, 4, 5, 6, 7, 8, 10]
    assert "custom_id 'id-0' is that of line 1" in str(found.value) and "so none was run" in str(found.value)
    done = batch(tmp_path)
    assert done.returncode == 2 and "line 2: custom_id" in done.stderr and not (tmp_path / "out.jsonl").exists()
    with pytest.raises(BadLinesError, match=r"in\.jsonl: the file has no request$"):
        check(tmp_path, [])
    with pytest.raises(BadLinesError, match="at most 100 lines"):
        check(tmp_path, [line(number) for number in range(101)])


def test_lines_with_a_common_beginning_are_neighbours(tmp_path):
    long = {name: name * 300 for name in "ab"}
    lines = check(tmp_path, [line(number, prompt=long["ab"[number % 2]] + str(number)) for number in range(8)])
    order = [one.number for one in in_order(lines)]
    assert sorted(order) == list(range(1, 9)) and {n % 2 for n in order[:4]} != {0, 1}


def test_outputs_of_others_are_not_touched(tmp_path):
    write(tmp_path / "in.jsonl", [line(0)])
    (tmp_path / "out.jsonl").write_text('{"text": "mine"}\n')
    with pytest.raises(ConfigError, match="line 1, is no result of a batch"):
        BatchOutput(tmp_path / "out.jsonl", tmp_path / "errors.jsonl")
    with BatchOutput(tmp_path / "other.jsonl", tmp_path / "errors.jsonl") as output:
        output.add("id-77", 200, "r", {})
    (tmp_path / "other.jsonl").replace(tmp_path / "out.jsonl")
    done = batch(tmp_path)
    assert done.returncode == 2 and "1 results of other requests, such as 'id-77'" in done.stderr
    with pytest.raises(ConfigError, match=r"needs -i IN.jsonl and -o OUT.jsonl"):
        BatchConfig(input="x")


def test_a_full_disk_keeps_whole_lines(tmp_path):
    with BatchOutput(tmp_path / "out.jsonl", tmp_path / "errors.jsonl") as output:
        output.add("a", 200, "r", {"text": "b"})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # files cannot grow beyond this
        try:
            with pytest.raises(OSError, match="File too large"):
                output.add("b", 200, "r", {"text": "c" * 8000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        output.add("d", 200, "r", {})
    assert list(results(tmp_path / "out.jsonl")) == ["a", "d"]

"""One server whose engine and HTTP process outlive each other."""

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.support.launcher import one_host
from tests.support.paths import ROOT
from tests.support.resumed_streams import BODIES, streamed
from tests.support.served import wait_for

COMMAND = [sys.executable, "-m", "ckdist.cli.main"]
WORDS = [*COMMAND, "serve", "--port", "0", "-t", "1", "--alias", "m"]


def started(*flags: str, before: tuple[str, ...] = ()) -> subprocess.Popen:
    given = {"env": one_host(), "cwd": ROOT, "text": True}
    return subprocess.Popen([*before, *WORDS, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **given)


def answering(process: subprocess.Popen):
    url = next(found[1] for line in process.stdout if (found := re.search(r"serving m at (http://\S+)", line)))
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 200, 30)
    yield process, url
    if process.poll() is None:
        process.kill()
    process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    yield from answering(started("-tp", "1", "--trace", str(tmp_path_factory.mktemp("trace") / "t.json")))


@pytest.fixture(scope="module")
def launched():
    yield from answering(started(before=(*COMMAND, "launch", "-n", "2")))


def child(server, module: str) -> psutil.Process:
    """A child of the command."""
    children = psutil.Process(server[0].pid).children()
    (found,) = [one for one in children if module in one.cmdline()]
    return found


def test_streams_go_on_after_the_end_of_the_engine_and_the_http_process_stays(server):
    url = server[1]
    bodies = [{**body, "max_tokens": 200, "ignore_eos": True} for body in BODIES]
    http, engine = child(server, "ckdist.serve").pid, child(server, "ckdist.cli.child_engine")
    with ThreadPoolExecutor(3) as pool:
        wanted, started = list(pool.map(lambda body: streamed(url, body), bodies)), threading.Event()
        answers = [pool.submit(streamed, url, body, started) for body in bodies]
        assert started.wait(30)
        engine.kill()
        assert [answer.result() for answer in answers] == wanted
    assert child(server, "ckdist.serve").pid == http and child(server, "ckdist.cli.child_engine").pid != engine.pid


def test_streams_go_on_after_the_loss_of_a_launched_rank(launched):
    process, url = launched
    body, begun = {**BODIES[0], "max_tokens": 200, "ignore_eos": True}, threading.Event()
    wanted, http = streamed(url, body), child(launched, "ckdist.serve").pid
    launcher = child(launched, "ckdist.cli.child_engine")
    (rank_1,) = [one for one in launcher.children() if one.environ().get("RANK") == "1"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(streamed, url, body, begun)
        assert begun.wait(30)
        rank_1.kill()
        assert answer.result() == wanted
    assert child(launched, "ckdist.serve").pid == http and not rank_1.is_running()
    assert launcher.is_running()  # and with it the agents of other hosts, which keep weights
    process.terminate()
    assert process.wait(30) == 0


def test_the_engine_stays_after_the_end_of_the_http_process(server):
    url = server[1]
    http, engine = child(server, "ckdist.serve"), child(server, "ckdist.cli.child_engine").pid
    http.kill()
    wait_for(lambda: not http.is_running() and httpx.get(f"{url}/health", timeout=20).is_success, 30, every=0.1)
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60).status_code == 200
    assert child(server, "ckdist.cli.child_engine").pid == engine


def test_a_signal_drains_both_and_the_engine_writes_its_trace(server):
    process, url = server
    trace = process.args[-1]
    body, begun = {**BODIES[0], "max_tokens": 150, "ignore_eos": True}, threading.Event()
    whole = streamed(url, body)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(streamed, url, body, begun)
        assert begun.wait(30)
        process.terminate()
        assert answer.result() == whole
    assert process.wait(30) == 0
    assert "GB of packed weights were kept from the last start" in process.stdout.read()
    with open(trace) as file:
        assert file.read(1)


@pytest.mark.parametrize("flags", [("-m", "/nowhere.gguf"), ("--kv-memory", "1K"), ("--prefill-file", "/nowhere")])
def test_a_wrong_start_ends_with_one_line_and_code_2(flags):
    process = started("-tp", "1", *flags)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 2 and output.count("ckdist: ") == 1 and "Traceback" not in output, output

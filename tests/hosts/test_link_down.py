"""`ckdist launch --restarts` over two hosts, the second by ssh, whose only link goes down and comes back."""

import json
import threading
import time

import httpx
import pytest

from tests.support import launcher
from tests.support.hosts import Hosts, Output, why_not
from tests.support.launched import launch, launched
from tests.support.served import wait_for, wait_healthy
from tests.support.ssh import Ssh, why_no_ssh
from tests.support.tiny_training import toml

pytestmark = pytest.mark.skipif(bool(why_not() or why_no_ssh()), reason=f"no such hosts: {why_not() or why_no_ssh()}")

TIMEOUT = 5.0  # --comm-timeout: four fifths of it is the silence after which a rank is lost
LOST = r"rank 0: rank 1 \(on \w+\) (?:has not been heard of|does not answer)"  # heartbeats, or the kernel, notice first
RESETS = 10
TOKENS = 900  # of an answer that a fault meets
URL = "http://127.0.0.1:8080"  # in the first host's network


@pytest.fixture
def hosts():
    with Hosts() as hosts, Ssh(hosts) as hosts.ssh:
        yield hosts


def over_the_link(hosts, *words: str):
    """`ckdist launch` on the first host: a rank there and one on the second. Busy machines may need more restarts."""
    both = ("-n", "2", "--hosts", f"{hosts.namespaces[0]},{hosts.addresses[1]}", "--restarts", "3")
    return launched(*both, *words, before=hosts.inside(0, *launcher.STUB), env=hosts.ssh.environment())


def reset_often(hosts: Hosts) -> None:
    """Resets the connections of data and of heartbeats between the ranks RESETS times, as soon as they are back."""
    for _ in range(RESETS):
        hosts.reset_connections(2)


def ask(tokens: int) -> tuple[int, str]:
    """Status and text of a completion; status 0 where the connection ends before."""
    body = {"prompt": "def main(", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    try:
        answer = httpx.post(f"{URL}/v1/completions", json=body, timeout=60)
    except httpx.TransportError:
        return 0, ""
    return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else ""


def test_a_server_of_two_stages(hosts):
    """Down for an eighth of the timeout nothing is lost. For longer, ranks start again, and requests go on."""
    short, ends, done = [], [], threading.Event()

    def ask_once() -> None:
        with hosts.entered(0):
            short.append(ask(TOKENS))

    def keep_asking() -> None:
        with hosts.entered(0):
            while not done.is_set():
                began = time.monotonic()
                status, _ = ask(100)
                ends.append((status, time.monotonic() - began))
                time.sleep(0.1)

    # more threads than CPUs: how fast memory is is not measured then, which takes ten seconds of two such hosts
    flags = ("-pp", "2", "-t", "3", "-c", "1024", "--comm-timeout", str(TIMEOUT))
    with over_the_link(hosts, "ckdist", "serve", *flags) as job, hosts.entered(0):
        output = Output(job)
        output.wait_for("serving ")
        before = ask(TOKENS)
        asking = threading.Thread(target=ask_once, daemon=True)
        asking.start()
        time.sleep(0.05)  # TOKENS take ten times as long
        hosts.set_link("down")
        time.sleep(TIMEOUT / 8)
        hosts.set_link("up")
        assert not short
        asking.join()
        assert short == [before] and before[0] == 200 and "has ended" not in output.text()

        asking = threading.Thread(target=ask_once, daemon=True)
        asking.start()
        reset_often(hosts)
        asking.join()
        assert short[1:] == [before] and "has ended" not in output.text(), output.text()
        output.wait_for(rf"the connection to rank 0 \(on {hosts.namespaces[0]}\) broke; it is back")

        clients = [threading.Thread(target=keep_asking, daemon=True) for _ in range(3)]
        for client in clients:
            client.start()
        wait_for(lambda: len(ends) > 3)
        hosts.set_link("down")
        output.wait_for(LOST)
        hosts.set_link("up")
        wait_healthy(URL, 20)
        assert ask(TOKENS) == before
        done.set()
        for client in clients:
            client.join()
        job.terminate()
        assert output.wait(20) == [0], output.text()
    assert "the engine has ended" in output.text() and "its requests go on" in output.text(), output.text()
    assert {status for status, _ in ends} == {200}
    assert hosts.wait_empty(5) == []


def losses(folder) -> dict[int, float]:
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return {(row := json.loads(line))["step"]: row["loss"] for line in lines}


def test_a_training_of_two_stages(hosts, tmp_path):
    """It goes on from its last checkpoint, with the losses of one that nothing has happened to."""
    fields = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "pipeline_parallel_size": 2}
    fields |= {"max_steps": 80, "save_steps": 20}
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = launch("-n", "2", "ckdist", "train", str(toml(tmp_path / "whole", **fields)))
    assert whole.returncode == 0, whole.stderr
    hosts.limit_link(6)  # so that the training lasts until all resets are done
    with over_the_link(hosts, "ckdist", "train", str(toml(tmp_path / "cut", ddp_timeout=TIMEOUT, **fields))) as job:
        output = Output(job)
        wait_for((tmp_path / "cut/out/metrics.jsonl").exists, 60)
        reset_often(hosts)
        hosts.limit_link(60)
        wait_for(lambda: list((tmp_path / "cut/out").glob("checkpoint-*")), 60)
        assert "restart" not in output.text(), output.text()
        hosts.set_link("down")
        output.wait_for(rf"{LOST}|host \S+ was lost")  # ssh may notice it first
        hosts.set_link("up")
        assert output.wait(60) == [0], output.text()
    assert "restart 1 of 3" in output.text() and "steps are done" in output.text()
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 80

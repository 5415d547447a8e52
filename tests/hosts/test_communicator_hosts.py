"""The communicator between two hosts (network namespaces joined by a link): the same bits, a slow link, and every
way to lose a rank.
"""

import functools
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import time

import pytest

from tests.support import launcher
from tests.support.collective_jobs import start_program
from tests.support.delayed_link import LinkDelay
from tests.support.hosts import Hosts, run, why_not
from tests.support.programs import collectives
from tests.support.thread_ranks import run_threads

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}")

TIMEOUT = 2.0
TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "mpi"], ids=["over tcp", "over mpi"])
PORT = 29511  # of a namespace of its own: nobody else's


@pytest.fixture
def hosts():
    before = set(pathlib.Path("/dev/shm").iterdir())
    with Hosts() as hosts:
        yield hosts
        for p in hosts.processes():
            p.kill()
    left = [p.name for p in pathlib.Path("/dev/shm").iterdir() if p not in before and "ckdist" in p.name]
    assert not left, f"left behind: {left}"


def start(hosts: Hosts, each: int, tmp_path, *words: str) -> list[subprocess.Popen]:
    """`python words...` on `each` ranks of either host, as torchrun would start them; rank r's process is the r-th."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(16))
    job = {
        "WORLD_SIZE": str(2 * each),
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": str(PORT),
        "CKDIST_JOB_SECRET_FILE": str(secret),
    }
    program = (*launcher.STUB, sys.executable, *words)
    return [start_program(hosts.inside(r // each, *program), {**job, "RANK": str(r)}) for r in range(2 * each)]


def finish(processes: list[subprocess.Popen], seconds: float) -> list[str]:
    """Standard output of all, which must end well."""
    end, out = time.monotonic() + seconds, []
    try:
        for rank, p in enumerate(processes):
            output, error = p.communicate(timeout=end - time.monotonic())
            assert p.returncode == 0, f"rank {rank}: {error}"
            out.append(output)
    finally:
        for p in processes:
            p.kill()
    return out


def test_a_small_sum_of_four_hosts_takes_one_way():
    """Each host sends to the others at once. By doubling, a sum of four would take two ways."""
    with Hosts(LinkDelay(0.04, 0.0), 4) as hosts:
        for said in finish(hosts.torchrun(1, "tests/support/programs/sum_latency.py", "15"), 60):
            assert 0.9 * 0.04 <= float(said) < 1.6 * 0.04, said


@functools.cache
def digests_of_threads() -> list[str]:
    return run_threads("aabb", lambda world: collectives.battery(world, 5000))


@TRANSPORTS
def test_same_bits(hosts, tmp_path, transport):
    words = ("tests/support/programs/collectives.py", transport, "share", "5000")
    before = hosts.carried()
    if transport == "mpi":
        code, output = hosts.run(2, *words)
        assert code == 0, output
    else:
        output = "".join(finish(start(hosts, 2, tmp_path, *words), 60))
    assert sorted(re.findall(r"^\d [0-9a-f]{64}$", output, re.MULTILINE)) == [
        f"{r} {digest}" for r, digest in enumerate(digests_of_threads())
    ]
    assert hosts.carried() - before > 500_000, "the ranks met, but not over the wire"


def test_20_mib(hosts, tmp_path):
    output = "".join(
        finish(start(hosts, 1, tmp_path, "tests/support/programs/collectives.py", "tcp", "share", "large"), 60)
    )
    assert len(re.findall(r"^\d [0-9a-f]{64}$", output, re.MULTILINE)) == 2, output


@TRANSPORTS
@pytest.mark.alone
def test_slow_link(hosts, tmp_path, transport):
    """100 Mbit/s: near what the link gives, and nobody takes a message that is on its way for a lost rank."""
    for namespace, link in zip(hosts.namespaces, hosts.links, strict=True):
        run(
            "tc",
            "-n",
            namespace,
            "qdisc",
            "add",
            "dev",
            link,
            "root",
            "tbf",
            "rate",
            "100mbit",
            "burst",
            "128kb",
            "latency",
            "50ms",
        )
    # The message takes 1.7 s on this link, longer than the timeout.
    words = ("tests/support/programs/slow_link.py", transport, str(20 << 20), "1.5")
    if transport == "mpi":
        code, output = hosts.run(1, *words)
        assert code == 0, output
    else:
        output = finish(start(hosts, 1, tmp_path, *words), 60)[0]
    message, reduction = map(float, re.search(r"([\d.]+) Mbit/s for a message, ([\d.]+)", output).groups())
    # both ways at once, the link drops the acknowledgements too
    assert 80 < message < 105 and 35 < reduction < 105, output


@pytest.mark.parametrize("what", ["reduce", "idle"])
@pytest.mark.parametrize("fault", ["kill", "stop", "link"])
def test_a_lost_rank_is_named_by_all(hosts, tmp_path, fault, what):
    """Rank 3, on the second host beside rank 2; or the whole other host."""
    processes = start(hosts, 2, tmp_path, "tests/support/programs/until_lost.py", "auto", what, str(TIMEOUT))
    try:
        pids = []
        for rank, p in enumerate(processes):
            (pid,) = re.fullmatch(rf"rank {rank} pid (\d+) running\n", p.stdout.readline()).groups()
            pids.append(int(pid))
        time.sleep(0.3)
        if fault == "link":
            hosts.set_link("down")
        else:
            os.kill(pids[3], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        began = time.monotonic()
        for rank in range(4 if fault == "link" else 3):
            _, error = processes[rank].communicate(timeout=20)
            lost = "[01]" if rank > 1 else "[23]"
            assert processes[rank].returncode == 1 and re.search(
                rf"rank {lost} " if fault == "link" else "rank 3 ", error
            ), error
        assert time.monotonic() - began < (TIMEOUT / 2 if fault == "kill" else TIMEOUT) + 1
    finally:
        for p in processes:
            p.kill()
            p.communicate()
    assert not hosts.processes()


def test_an_outage_of_two_thirds_of_the_timeout_loses_nobody(hosts, tmp_path):
    """TCP alone would send again after 6.2 s at the latest, which leaves a second for a busy machine."""
    processes = start(hosts, 1, tmp_path, "tests/support/programs/until_lost.py", "tcp", "reduce", "8")
    try:
        for p in processes:
            assert p.stdout.readline()
        hosts.set_link("down")
        time.sleep(5.3)
        hosts.set_link("up")
        time.sleep(3)
        assert [p.poll() for p in processes] == [None, None]
        processes[1].kill()
        _, error = processes[0].communicate(timeout=20)
        assert "rank 1 " in error and "closed the connection" in error, error
    finally:
        for p in processes:
            p.kill()
            p.communicate()

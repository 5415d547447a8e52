"""The replay's view of a communicator against numpy, bit for bit: ranks as threads, in shared memory, over transports
and both; lost ranks; data races; allocations.
"""

import gc
import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ckdist import errors
from ckdist.comm.communicator import open_communicator
from ckdist.comm.world import start_world
from tests.support import thread_ranks
from tests.support.compiled import NATIVE, OURS, compiled
from tests.support.exchange import exchange
from tests.support.launcher import environment
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.steps import ARENA_BYTES, Steps, open_steps


ROUNDS = 60  # of one rank, and so fewer of more: each checks the numbers of all


def opened(world, transport: str = "auto", timeout: float = 20.0):
    return open_communicator(world, transport, timeout=timeout, spins=20, arena_bytes=ARENA_BYTES)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_threads(size):
    thread_ranks.run_threads(size, lambda world: exchange(opened(world), ROUNDS // size))


@pytest.mark.parametrize("hosts", ["ab", "abc", "aab", "aabb", "abab", "aabbc", "aabbbcc", "abcabcabc"])
def test_hosts(hosts):
    def body(world):
        communicator = opened(world)
        exchange(communicator, ROUNDS // len(hosts), hosts=world.hosts)
        return communicator.transport

    kinds = thread_ranks.run_threads(hosts, body)
    assert set(kinds) == {"tcp" if len(set(hosts)) == len(hosts) else "shared memory and tcp"}


def test_one_host_over_a_named_transport():
    assert set(
        thread_ranks.run_threads(3, lambda world: (exchange(c := opened(world, "tcp"), 20), c.transport)[1])
    ) == {"tcp"}


def test_several_steps_and_collectives_do_not_meet():
    """Two views and the communicator itself, by turns: none gets what was meant for another."""

    def body(world):
        c = opened(world)
        one, other = Steps(c, floats=100), Steps(c, floats=100)
        for step in range(20):
            one.all_reduce(step % 2, 100, step)
            assert c.all_reduce(np.full(3000, world.rank + 1, np.float32))[0] == world.size * (world.size + 1) / 2
            other.all_reduce(step % 2, 50, step)
            if world.rank == 0:
                one.send(np.full(9, step, np.int32), world.size - 1)
                other.send(np.full(9, -step, np.int32), world.size - 1)
            elif world.rank == world.size - 1:
                assert other.recv(np.empty(9, np.int32), 0)[0] == -step
                assert one.recv(np.empty(9, np.int32), 0)[0] == step

    for hosts in ("aa", "ab", "aab"):
        thread_ranks.run_threads(hosts, body)


@pytest.mark.parametrize("hosts", ["aaa", "aabb"])
def test_a_rank_that_gives_up_is_named_on_every_host(hosts):
    """The last rank fails, which its own host sees in memory, and another host hears over the transport."""
    last = len(hosts) - 1

    def body(world):
        steps = open_steps(world, timeout=5.0)
        world.gather(None)
        if world.rank == last:
            steps.abandon("its disk broke")
            return
        with pytest.raises(errors.CommError, match=f"rank {last} .*gave up: its disk broke.*step 5") as raised:
            steps.all_reduce(0, 16, 5)
        steps.abandon(str(raised.value))

    start = time.monotonic()
    thread_ranks.run_threads(hosts, body)
    assert time.monotonic() - start < 4


@pytest.mark.parametrize("hosts", ["aaa", "aabb"])
def test_a_rank_that_is_late_is_named_on_every_host(hosts):
    last, told = len(hosts) - 1, threading.Barrier(len(hosts))

    def body(world):
        steps = open_steps(world, timeout=1.0)
        world.gather(None)
        try:
            if world.rank != last:
                with pytest.raises(
                    errors.CommError, match=f"rank {last} .*did not answer within 1 s .in step 5"
                ) as raised:
                    steps.all_reduce(0, 16, 5)
                steps.abandon(str(raised.value))
        finally:
            told.wait(20)

    thread_ranks.run_threads(hosts, body)


STOPPED_RANK = """
import os, signal
from ckdist.comm.world import start_world
from tests.support.steps import open_steps
world = start_world()
steps = open_steps(world, timeout=2.0)
print("there", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_rank_that_is_stopped_between_steps_is_named(monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a" * 32)
    job = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "CKDIST_JOB_SECRET_FILE": str(secret),
    }
    for name, value in {**job, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED_RANK],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**environment(), **job, "RANK": "1"},
    ) as peer:
        try:
            steps = open_steps(start_world(), timeout=2.0)
            assert peer.stdout.readline() == b"there\n"
            with pytest.raises(errors.CommError, match=r"rank 1 has not been heard of for (1\.9|2\.\d) s: it is st"):
                for _ in range(200):
                    time.sleep(0.05)
                    steps.check_peers()
        finally:
            peer.kill()


def test_steps_leave_no_descriptor_behind():
    count = lambda: sum(
        "memfd:ckdist" in os.readlink(p) for p in pathlib.Path("/proc/self/fd").iterdir() if p.is_symlink()
    )
    gc.collect()
    before = count()
    for _ in range(5):
        thread_ranks.run_threads(2, lambda world: exchange(opened(world), 1))
    gc.collect()
    assert count() <= before


@pytest.fixture(scope="module")
def steps_of_threads():
    """tests/native/steps.cpp under ThreadSanitizer."""
    rooms = {
        "": ("step_communicator", "channel"),
        "algorithms": ("order",),
        "bootstrap": ("host_memory", "segment", "shm_rendezvous"),
        "failure": ("failure_detector", "process"),
        "transports": (
            "sealed_socket",
            "sealer",
            "stream_frames",
            "stream_transport",
            "tcp_transport",
            "transport",
        ),
    }
    sources = [NATIVE / "comm" / room / f"{name}.cpp" for room, names in rooms.items() for name in names]
    sources += [NATIVE / "core/crypto_library.cpp", NATIVE / "runtime/pool.cpp", OURS / "steps.cpp"]
    return compiled("steps", sources, "-O1", "-g1", "-fsanitize=thread", "-pthread", unknown=("tsan",))


@pytest.mark.parametrize("ranks, threads, rounds", [(1, 3, 500), (2, 3, 500), (3, 2, 250), (5, 1, 150), (7, 2, 60)])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_data_race_and_no_allocation(steps_of_threads, transport, ranks, threads, rounds):
    """A rank's data is ordered by barriers, flags and slots alone; once buffers have grown, no operation allocates."""
    words = [steps_of_threads, transport, str(ranks), str(threads), str(rounds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "WARNING" not in done.stderr, (done.stdout + done.stderr)[:4000]

"""Engines that share cores: each gets an equal share of the seconds."""

import os
import subprocess
import sys
import threading
import time

import pytest

from ckdist.engine.core_turns import CoreTurns, turns_bytes


@pytest.fixture
def path():
    file = os.memfd_create("turns")
    os.ftruncate(file, turns_bytes(2))
    yield f"/proc/{os.getpid()}/fd/{file}"
    os.close(file)


def test_an_engine_with_short_steps_gets_as_many_seconds_as_one_with_long_steps(path):
    """With a lock alone, each step of 1 ms would wait for one of 30 ms."""
    used = [0.0, 0.0]
    end = time.monotonic() + 1.0

    def run(number: int, seconds: float) -> None:
        turns = CoreTurns(path, number)
        while time.monotonic() < end:
            with turns:
                begin = time.monotonic()
                time.sleep(seconds)
                used[number] += time.monotonic() - begin

    threads = [threading.Thread(target=run, args=(number, seconds)) for number, seconds in enumerate((0.001, 0.03))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used[0] > 0.4 * used[1] > 0


def test_an_engine_that_is_killed_while_it_waits_stops_nobody(path):
    waiting = f"""
import sys
from ckdist.engine.core_turns import CoreTurns
turns = CoreTurns({path!r}, 1)
print("waits", flush=True)
with turns:
    pass
"""
    turns = CoreTurns(path, 0)
    with turns, subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"waits\n"
        time.sleep(0.1)
        other.kill()
    with turns:
        pass

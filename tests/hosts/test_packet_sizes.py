"""A network between hosts that drops large packets and says nothing of it: an MTU that is wrong on the way."""

import re
import shutil

import pytest

from tests.support.hosts import Hosts, Output, why_not

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces here: {why_not()}"),
    pytest.mark.skipif(not shutil.which("tc"), reason="tc (iproute2) is not installed"),
]

ADVICE = "check that the MTU is the same on both hosts and on all switches between them"

PROGRAM = """
import time
import numpy as np
from ckdist.comm.communicator import open_communicator
from ckdist.comm.world import start_world
from ckdist.errors import CommError
world = start_world()
try:
    c = open_communicator(world, "tcp", timeout=20, arena_bytes=1 << 22)
    c.barrier()
    print("open", flush=True)
    time.sleep(3)
    c.all_reduce(np.ones(1 << 18, np.float32))
except CommError as error:
    print("error:", error, flush=True)
    world.close()
"""


@pytest.fixture
def hosts():
    with Hosts() as hosts:
        yield hosts


def test_large_packets_that_are_lost_are_noticed_at_start(hosts):
    hosts.drop_large_packets()
    output = Output(*hosts.torchrun(1, "-c", PROGRAM))
    output.wait(60)
    a, b = hosts.namespaces
    (line, *_) = lines = [line for line in output.text().splitlines() if line.startswith("error:")]
    assert len(lines) == 2 and "open" not in output.text() and "Traceback" not in output.text(), output.text()
    assert f"({a}, {hosts.addresses[0]})" in line and f"({b}, {hosts.addresses[1]})" in line and ADVICE in line, line
    assert re.search(r"small messages .* and one of (16|256) KiB does not", line), line


def test_large_packets_that_are_lost_later_are_a_hint_in_the_error(hosts):
    processes = hosts.torchrun(1, "-c", PROGRAM)
    output = Output(*processes)
    output.wait_for("open", 2)
    hosts.drop_large_packets()
    output.wait(60)
    assert re.search(rf"error: .*nothing large is acknowledged while heartbeats pass; {ADVICE}", output.text()), (
        output.text()
    )

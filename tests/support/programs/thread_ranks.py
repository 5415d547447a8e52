"""`thread_ranks.py RANKS THREADS`: the replay against the interpreter with ranks as threads of one process, on one host
and over TCP; and ranks of several hosts that exchange, idle with their heartbeats, and lose one.

Built with -fsanitize=thread, the library then tells of every race between ranks and between their threads.
"""

import sys
import time

from ckdist.comm.communicator import open_communicator
from ckdist.errors import CommError
from tests.support.exchange import exchange
from tests.support.programs.replay import check
from tests.support.specs import FAMILIES
from tests.support.steps import ARENA_BYTES, open_steps
from tests.support.thread_ranks import run_threads

ranks, threads = int(sys.argv[1]), int(sys.argv[2])
for family in FAMILIES:
    for chunk in (64, 16):
        worst = run_threads(ranks, lambda world: check(world, family, "auto", threads, chunk))[0]
        print(f"{family} {worst:.2e}")
        if worst > 5e-7:
            sys.exit(f"{family} with {ranks} ranks of {threads} threads differs by {worst}")

TIMEOUT = 20.0  # the sanitizer makes everything slower; a beat comes each second


def over_hosts(world) -> None:
    communicator = open_communicator(world, timeout=TIMEOUT, spins=20, arena_bytes=ARENA_BYTES)
    exchange(communicator, 10, hosts=world.hosts)


def idle_then_lost(world) -> None:
    """Two seconds of heartbeats alone, then the last rank gives up: all others are told, wherever they wait."""
    steps = open_steps(world, timeout=TIMEOUT)
    if world.rank == world.size - 1:
        time.sleep(2)
        return steps.abandon("meant to fail")
    try:
        if world.rank:
            steps.receive()
        while True:
            steps.check_peers()
            time.sleep(0.01)
    except CommError as error:
        if "meant to fail" not in str(error):
            raise
        steps.abandon(str(error))


for hosts in {1: (), 3: ("abc", "aab"), 7: ("aabbcca",)}[ranks]:
    run_threads(hosts, over_hosts)
    worst = max(run_threads(hosts, lambda world: check(world, "llama", "auto", threads, 64)))
    if worst > 5e-7:
        sys.exit(f"ranks on hosts {hosts} differ by {worst}")
    run_threads(hosts, idle_then_lost)
    print(f"ranks on hosts {hosts}")

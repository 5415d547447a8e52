"""`thread_communicator.py RANKS`: every operation of a communicator on every transport, with ranks as threads of one
process, then a rank that gives up.

Built with -fsanitize=thread, the library then tells of every access that no flag, lock or message orders.
"""

import sys
import time

import numpy as np

from ckdist.comm.communicator import open_communicator
from ckdist.comm.thresholds import Thresholds
from ckdist.errors import CommError
from tests.support.collective_jobs import options
from tests.support.programs import collectives
from tests.support.thread_ranks import run_threads

TIMEOUT = 60.0  # the sanitizer makes everything slower
LOW = Thresholds(1 << 10, 2 << 10, 2 << 10)  # small arrays go both ways, those of small values and those of large ones


def lose_one(world, **opened) -> None:
    """The last rank gives up while the others are in a call, waiting for a message, or idle."""
    c = open_communicator(world, timeout=TIMEOUT, arena_bytes=1 << 26, **opened)
    last = c.size - 1
    try:
        c.barrier()
        if c.rank == last:
            c.abandon("meant to fail")
        while c.rank == 0:
            c.check_peers()
            time.sleep(0.01)
        if c.rank == 1:
            c.recv(np.empty(9, np.float32), 0)
        c.all_reduce(np.zeros(100_000, np.float32))
    except CommError as error:
        if "meant to fail" not in str(error):
            raise
        return
    raise AssertionError("nobody was told")


ranks = int(sys.argv[1])
for transport in ("shared", "tcp", "hybrid"):
    hosts, opened = options(transport, ranks)
    digests = run_threads(
        hosts, lambda world: collectives.battery(world, 5000, timeout=TIMEOUT, thresholds=LOW, **opened)
    )
    run_threads(hosts, lambda world: lose_one(world, **opened))
    print(f"{ranks} ranks, {transport}: {digests[0][:8]}", flush=True)

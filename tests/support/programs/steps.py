"""A rank program for tests of faults: `steps.py SECONDS busy|idle TRANSPORT` with the comm timeout in seconds.

Busy ranks run one step after another, idle ones wait for the first, until something fails: then the one line and exit
code 1.
"""

import sys
import time

import numpy as np

from ckdist.comm.world import leave, start_world
from ckdist.errors import CommError
from tests.support.steps import open_steps

FLOATS, ROWS, VOCAB = 1 << 16, 4, 1000

timeout, kind, transport = float(sys.argv[1]), sys.argv[2], sys.argv[3]
world = start_world()
share = VOCAB // world.size
sizes = {"floats": FLOATS, "rows": ROWS, "vocab": VOCAB, "first_column": share * world.rank, "columns": share}
steps = open_steps(world, transport, timeout, ints=100, **sizes)
try:
    print(f"rank {world.rank} began", flush=True)
    while True:
        if kind == "idle" and world.rank == 0:
            time.sleep(0.1)
            steps.check_peers()
            continue
        if world.rank == 0:
            steps.publish(np.full(10, 7, np.int32))
        else:
            steps.receive()
        for step in range(4):
            steps.all_reduce(step % 2, FLOATS >> (step * 3), step)
        steps.gather_logits(ROWS, 4)
except CommError as error:
    steps.abandon(str(error))
    print(f"ckdist: rank {world.rank}: {error}", flush=True)
    leave(1)

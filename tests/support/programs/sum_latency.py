"""Prints the median seconds of sums of 4 KiB over all ranks: sum_latency.py ROUNDS."""

import statistics
import sys
import time

import numpy as np

from ckdist.comm.bootstrap.tcp_world import TcpWorld
from ckdist.comm.communicator import open_communicator

world = TcpWorld.from_environment()
communicator = open_communicator(world, "tcp", timeout=20.0, arena_bytes=1 << 20)
x, took = np.full(1024, world.rank + 1.0, np.float32), []
for _ in range(int(sys.argv[1])):
    begin = time.monotonic()
    y = communicator.all_reduce(x)
    took.append(time.monotonic() - begin)
    assert (y == world.size * (world.size + 1) / 2).all()
print(statistics.median(took), flush=True)
communicator.close()
world.close()

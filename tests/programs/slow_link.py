"""Rank 0 sends rank 1 a message that takes far longer than the timeout: slow_link.py TRANSPORT BYTES TIMEOUT. Prints what the link gave, in Mbit/s."""

import sys
import time

import numpy as np

from ckdist.comm.communicator import open_communicator
from ckdist.comm.tcp_world import TcpWorld, is_started
from ckdist.comm.world import MpiWorld

transport, size, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
world = TcpWorld.from_environment() if is_started() else MpiWorld()
communicator = open_communicator(world, transport, timeout=timeout, arena_bytes=1 << 26)
x = np.arange(size // 4, dtype=np.int32) if world.rank == 0 else np.zeros(size // 4, np.int32)
communicator.barrier()
start = time.monotonic()
if world.rank == 0:
    communicator.send(x, 1)
else:
    communicator.recv(x, 0)
    assert x[-1] == x.size - 1 and x[x.size // 2] == x.size // 2
communicator.barrier()
seconds = time.monotonic() - start
y = communicator.all_reduce(np.full(size // 4, world.rank + 1, np.int32))
assert (y == 3).all()
if world.rank == 0:
    print(f"{size * 8e-6 / seconds:.1f} Mbit/s for a message, {size * 8e-6 / (time.monotonic() - start - seconds):.1f} for an all_reduce", flush=True)
communicator.close()
world.close()

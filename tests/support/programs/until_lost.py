"""One rank of a job that goes on until a peer is lost, and then says how it came to know: until_lost.py TRANSPORT WHAT
[TIMEOUT [INTERFACE]].

WHAT: `reduce` for ever, wait to `recv` from rank 1, or be `idle` and ask now and then. Started by mpirun, or by RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import os
import sys
import time

import numpy as np

from ckdist.comm.bootstrap.tcp_world import TcpWorld, is_started
from ckdist.comm.communicator import open_communicator
from ckdist.comm.mpi_world import MpiWorld
from ckdist.errors import CommError

transport, what, timeout = sys.argv[1], sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 2.0
world = TcpWorld.from_environment() if is_started() else MpiWorld()
interface = sys.argv[4] if len(sys.argv) > 4 else None
communicator = open_communicator(world, transport, timeout=timeout, arena_bytes=1 << 26, interface=interface)
x = np.ones(20_000, np.float32)
assert communicator.all_reduce(x)[0] == world.size
print(f"rank {world.rank} pid {os.getpid()} running", flush=True)
try:
    while what == "reduce":
        communicator.all_reduce(x)
        time.sleep(0.001)  # else the ranks take two cores for seconds
    if what == "recv" and world.rank != 1:
        communicator.recv(x, 1)
    while True:
        communicator.check_peers()
        time.sleep(0.02)
except CommError as error:
    print(f"rank {world.rank}: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # under MPI nothing may wait for the lost rank

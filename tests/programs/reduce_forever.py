"""One rank of a job started by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT that reduces until a peer is lost: TRANSPORT [INTERFACE]."""

import sys

import numpy as np

from ckdist.comm.communicator import open_communicator
from ckdist.comm.tcp_world import TcpWorld
from ckdist.errors import CommError

world = TcpWorld.from_environment()
communicator = open_communicator(world, sys.argv[1], timeout=2, arena_bytes=1 << 26, interface=sys.argv[2] if len(sys.argv) > 2 else None)
x = np.ones(20_000, np.float32)
assert communicator.all_reduce(x)[0] == world.size
print("running", flush=True)
try:
    while True:
        communicator.all_reduce(x)
except CommError as error:
    print(error, file=sys.stderr)
    sys.exit(1)

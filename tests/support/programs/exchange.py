"""A rank program: `exchange.py ROUNDS`: what a group must do, over every transport of the world it is started in."""

import sys

from ckdist.comm.group import open_group
from ckdist.comm.world import start_world
from tests.support.exchange import exchange

world = start_world()
for transport in ("auto", "mpi", "tcp"):
    group = open_group(world, 20, 20.0, transport)
    exchange(group.handle, world.rank, world.size, int(sys.argv[1]))
    if world.rank == 0:
        print(group.kind, "right")
world.close()

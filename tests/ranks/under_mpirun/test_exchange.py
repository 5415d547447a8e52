"""Step communicators of processes, over every transport: sums bit for bit, messages in order, logits in place."""

from ckdist.comm.group import open_group
from tests.support.exchange import exchange

KINDS = {"auto": "shared memory", "mpi": "mpi", "tcp": "tcp"}


def test_exchange(world, transports):
    for transport in transports:
        group = open_group(world, 20, 20.0, transport)
        exchange(group.handle, world.rank, world.size, 40)
        assert world.size == 1 or group.kind == KINDS[transport]

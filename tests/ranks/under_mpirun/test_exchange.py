"""Step communicators of processes, over every transport: sums bit for bit, batches in order, logits in place."""

from ckdist.comm.communicator import open_communicator
from tests.support.exchange import exchange
from tests.support.steps import ARENA_BYTES

ROUNDS = 36  # of one rank, and so fewer of more: each checks the numbers of all
KINDS = {"auto": "shared memory", "mpi": "mpi", "tcp": "tcp"}


def test_exchange(world, transports):
    for transport in transports:
        communicator = open_communicator(world, transport, timeout=20.0, spins=20, arena_bytes=ARENA_BYTES)
        exchange(communicator, ROUNDS // world.size)
        assert world.size == 1 or communicator.transport == KINDS[transport]

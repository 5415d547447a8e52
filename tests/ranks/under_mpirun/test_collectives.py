"""Every operation of the communicator, bit by bit against numpy, with the same results on every transport."""

import pytest

from tests.support.programs import collectives
from tests.support.thread_ranks import run_threads


@pytest.fixture(autouse=True)
def others(world):
    if world.size == 1:
        pytest.skip("for several ranks")


def test_every_operation_on_every_transport(world, transports):
    digests = {collectives.battery(world, 5000, transport=transport) for transport in transports}
    assert len(digests) == 1


def test_processes_get_what_threads_get(world):
    own = world.gather(collectives.battery(world, 1023))
    expected = run_threads(world.size, lambda ranks: collectives.battery(ranks, 1023)) if world.rank == 0 else None
    assert own == world.broadcast(expected)


def test_33_mib(world, transports):
    if world.size > 2:
        pytest.skip("33 MiB are for two ranks: more take minutes on two cores")
    parts = (collectives.large,)
    assert (
        len(
            {
                collectives.battery(world, collectives.LARGE_BYTES, parts, transport=transport)
                for transport in transports
            }
        )
        == 1
    )

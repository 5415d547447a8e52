"""Tests that are the ranks' own code: `mpirun -n N python -m tests.support.mpi_pytest tests/ranks/under_mpirun`, for
any N.

Every rank runs every test, in the same order. One rank needs no launcher: plain pytest runs them, too.
"""

import pytest

from ckdist.comm.world import start_world


@pytest.fixture(scope="session")
def world(pytestconfig):
    """The job's world, joined once; all tests of a run share it. It is left after the summary, which asks MPI."""
    world = start_world()
    pytestconfig.add_cleanup(world.close)
    return world


@pytest.fixture
def transports(world) -> list[str]:
    """What ranks of this job can be joined by; `auto` is shared memory on one host."""
    return ["auto", "mpi", "tcp"] if world.size > 1 else ["auto"]

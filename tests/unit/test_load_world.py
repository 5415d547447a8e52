"""A rank that fails alone ends a load on every rank, in the same call, and the World can be used further on."""

import pytest

from ckdist.errors import CapacityError, CkdistError
from ckdist.worker.load_world import LoadWorld
from tests.support.thread_ranks import run_threads


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("call", ["gather", "broadcast"])
def test_a_rank_that_fails_alone(failing, call):
    def rank(world):
        load = LoadWorld(world)
        try:
            assert load.gather(world.rank) == [0, 1, 2] and load.broadcast(world.rank + 7) == 7
            if world.rank == failing:
                raise CapacityError("no room")
            getattr(load, call)(1)
        except CkdistError as error:
            return load.fail(error), world.gather(world.rank)
        return "", []

    results = run_threads(3, rank)
    assert all("no room" in reason and after == [0, 1, 2] for reason, after in results)
    assert len({reason for rank, (reason, _) in enumerate(results) if rank != failing}) == 1
    assert results[failing - 1][0].startswith(f"rank {failing} (")

"""The native replay means what the program means: any number of ranks and threads, over shared memory, MPI and TCP."""

import pytest

from tests.launcher import run_ranks
from tests.programs.replay import check
from tests.thread_world import run_ranks_as_threads


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_replay_equals_interpreter(ranks):
    done = run_ranks(ranks, "tests/programs/replay.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("e-08") + done.stdout.count("e-07") == 4 * (1 if ranks == 1 else 3) * 2


@pytest.mark.parametrize("ranks, threads", [(2, 2), (3, 1), (7, 2)])
def test_replay_with_ranks_as_threads(ranks, threads):
    assert run_ranks_as_threads(ranks, lambda world: check(world, "gemma2", "auto", threads, 16))[0] < 5e-7

"""The native replay means what the program means: any number of ranks and threads, over shared memory and over MPI."""

import pytest

from tests.launcher import run_ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_replay_equals_interpreter(ranks):
    done = run_ranks(ranks, "tests/programs/replay.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("e-08") + done.stdout.count("e-07") == (4 if ranks == 1 else 8) * 2

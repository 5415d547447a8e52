"""Two models in one job: the second is loaded beside steps of the first, and the first unloaded beside those of it."""

import pytest

from tests.support.launcher import run_ranks


@pytest.mark.parametrize("ranks, transport, stages", [(1, "auto", 1), (2, "auto", 1), (2, "mpi", 1), (2, "tcp", 2)])
def test_both_have_the_bits_that_each_has_alone(ranks, transport, stages):
    done = run_ranks(ranks, "-m", "tests.support.programs.two_models", transport, str(stages))
    assert done.returncode == 0 and "two models" in done.stdout, done.stdout + done.stderr

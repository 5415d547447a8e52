"""The tests of `under_mpirun`, which are the ranks' own code, on several ranks; on one rank they run by themselves."""

import pytest

from tests.support.launcher import run_ranks

FOLDER = "tests/ranks/under_mpirun"
WHOLE_MODELS = tuple(  # two and three ranks have all that more have
    f"--ignore={FOLDER}/test_{name}.py" for name in ("golden", "encoders", "encoder_decoders")
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks, without", [(2, ()), (3, ()), (5, WHOLE_MODELS)])
def test_the_ranks_own_code(ranks, without):
    done = run_ranks(ranks, "-m", "tests.support.mpi_pytest", FOLDER, *without, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

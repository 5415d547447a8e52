"""Blocks of the cache that were copied out and in again are what they were, and copies run beside steps."""

import pytest

from tests.support.launcher import run_ranks


ENDS = {1: "a disk that does not answer was named", 2: "blocks were copied beside steps"}


@pytest.mark.parametrize("ranks", ENDS)
def test_blocks_return_as_they_were(ranks, tmp_path):
    done = run_ranks(ranks, "-m", "tests.support.programs.copied_blocks", str(tmp_path))
    assert done.returncode == 0 and ENDS[ranks] in done.stdout, done.stdout + done.stderr

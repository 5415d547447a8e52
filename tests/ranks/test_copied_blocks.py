"""Blocks of the cache that were copied out and in again are what they were, and copies run beside steps."""

import pytest

from tests.support.launcher import run_ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_return_as_they_were(ranks, tmp_path):
    done = run_ranks(ranks, "-m", "tests.support.programs.copied_blocks", str(tmp_path))
    assert done.returncode == 0 and "blocks were copied beside steps" in done.stdout, done.stdout + done.stderr

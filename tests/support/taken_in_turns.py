"""Files that jobs of several ranks share."""

import pytest

from tests.support.thread_ranks import ThreadWorld

PROCESSES = 8  # under mpirun, one file of this number is taken


def skip_most(world, index: int) -> None:
    """One rank takes every file. Ranks of mpirun take few files, and ranks that are threads the others."""
    if world.size > 1 and index % PROCESSES and not isinstance(world, ThreadWorld):
        pytest.skip("for ranks that are threads")


def on_threads(files) -> list[tuple[object, int]]:
    """Each file that mpirun leaves to threads, and its number of ranks: 2 or 3."""
    return [(file, 2 + index % 2) for index, file in enumerate(files) if index % PROCESSES]

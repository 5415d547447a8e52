"""Files that jobs of several ranks take in turns."""

import pytest


def skip_every_other(world, index: int) -> None:
    """One rank takes every file; two ranks take the files at even places, and three the others."""
    if world.size > 1 and (world.size + index) % 2:
        pytest.skip("for another number of ranks")

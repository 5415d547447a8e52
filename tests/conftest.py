"""What a test measures is not kept in the cache of whoever runs it."""

import os
import tempfile

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache():
    """A cache folder of this run, which child processes inherit."""
    with tempfile.TemporaryDirectory(prefix="ckdist-cache-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield folder

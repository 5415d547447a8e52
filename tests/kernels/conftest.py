"""Threads of kernels."""

import pytest

from ckdist.program import pool

POLLS = 50  # before a thread sleeps


@pytest.fixture(scope="session", autouse=True)
def polls_of_pools():
    """Workers share the CPUs: a thread that polls for long holds up the one that it waits for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "SPINS", POLLS)
        yield

"""The native replay of small random models against the numpy interpreter, over every transport."""

import pytest

from tests.support.programs.replay import check
from tests.support.specs import FAMILIES

LARGEST = 5e-7  # difference of logits of about 1: float32 sums in another order


@pytest.mark.parametrize("threads, chunk", [(1, 64), (3, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_replay_equals_interpreter(world, transports, family, threads, chunk):
    for transport in transports:
        assert check(world, family, transport, threads, chunk) < LARGEST

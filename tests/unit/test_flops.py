"""What a step reads and computes at least."""

import pytest

from ckdist.planning.flops import FlopCounts


def test_a_step_reads_the_experts_that_its_tokens_take():
    half = FlopCounts(5, {0.25: 200.0}, {2: 10.0}, {2: 1.0})
    work = half + half
    assert work.bytes_read(1) == 110 and work.bytes_read(2) == pytest.approx(10 + 400 * (1 - 0.75**2))
    assert work.bytes_read(1000) == pytest.approx(410)
    assert work.operations(3, 2) == {2: 64.0}

"""The native replay of small random models against the numpy interpreter, over every transport."""

import pytest

from tests.support.programs.replay import check

LARGEST = 5e-7  # difference of logits of about 1: float32 sums in another order


@pytest.mark.parametrize(
    "family, threads, chunk",
    [("llama", 1, 64), ("llama", 3, 16), ("qwen2", 3, 16), ("qwen3", 1, 64), ("gemma2", 3, 16)],
)
def test_replay_equals_interpreter(world, transports, family, threads, chunk):
    for transport in transports:
        assert check(world, family, transport, threads, chunk) < LARGEST

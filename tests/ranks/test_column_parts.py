"""Products of few tiles on many threads: their columns are divided, and a row has the same bits in any batch, layout
and division of work.
"""

import sys

import numpy as np
import pytest

from ckdist.engine.single import SingleSequence
from tests.support.programs.replay import build
from tests.support.situations import driven, situations
from tests.support.thread_ranks import run_threads

WIDE = {"hidden": 768, "ffn": 1040, "heads": 32, "kv_heads": 4}
MANY = 24  # threads; up to 16 divide no columns


def logits_of(ranks, family, threads, body, chunk=24):
    """body(executable) on rank 0. `threads`: of each rank."""

    def rank(world):
        *_, executable, _keep = build(world, family, "auto", threads[world.rank], chunk, 12, "f32", **WIDE)
        result = driven(world, executable, body)
        executable.close()
        return result

    return run_threads(ranks, rank)[0]


def in_chunks_and_one_by_one(executable):
    executable.prefill_from = sys.maxsize
    whole = SingleSequence(executable).feed(np.arange(40))[-1:].copy()
    alone = SingleSequence(executable)
    for token in range(40):
        last = alone.feed([token])
    return whole, last.copy()


def tensor_and_token(executable):
    executable.prefill_from = sys.maxsize
    expected = situations(executable)
    executable.prefill_from = 0
    return expected, situations(executable)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "experts", "latent", "mamba2"])
def test_many_threads_have_the_bits_of_single_tokens_and_the_numbers_of_few(family):
    whole, alone = logits_of(1, family, [MANY], in_chunks_and_one_by_one)
    np.testing.assert_array_equal(whole, alone)
    few, _ = logits_of(1, family, [2], in_chunks_and_one_by_one)
    np.testing.assert_allclose(whole, few, atol=2e-5 * np.abs(few).max())
    assert (whole != few).any()


@pytest.mark.parametrize("family, threads", [("llama", [MANY, MANY]), ("gemma2", [2, MANY, 1]), ("qwen3", [MANY, 2])])
def test_ranks_of_any_threads_agree_on_the_parts(family, threads):
    expected, found = logits_of(len(threads), family, threads, tensor_and_token)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)

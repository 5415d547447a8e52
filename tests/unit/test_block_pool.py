"""The block pool: counts that add up, exact prefix hits, least recently used eviction that never orphans a block."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.engine.block_pool import ROOT, BlockPool
from ckdist.engine.tenant import ONE_TENANT
from ckdist.program.step_batch import BLOCK_TOKENS


def tokens_of(*values: int) -> np.ndarray:
    """Whole blocks, each filled with one value."""
    return np.repeat(np.array(values, np.int32), BLOCK_TOKENS)


def fill(pool: BlockPool, *values: int) -> list[int]:
    """Holds the longest known prefix and computes the rest, as a sequence does."""
    blocks = pool.match(tokens_of(*values), 10**9)
    pool.hold(blocks)
    for value in values[len(blocks) :]:
        blocks += pool.share(pool.allocate(1), blocks[-1] if blocks else ROOT, tokens_of(value).tobytes())
    return blocks


def test_a_released_prefix_is_found_again_and_only_as_a_prefix():
    pool = BlockPool(8)
    blocks = fill(pool, 1, 2, 3)
    pool.release(blocks)
    assert pool.available == 8 and pool.cached == 3
    assert pool.match(tokens_of(1, 2, 3, 4), 10**9) == blocks
    assert pool.match(tokens_of(1, 2, 9), 10**9) == blocks[:2]
    assert pool.match(tokens_of(1, 2, 3), 3 * BLOCK_TOKENS - 1) == blocks[:2]
    assert pool.match(tokens_of(2, 3), 10**9) == []  # the same tokens after another parent are another block


def test_two_that_compute_the_same_block_end_with_one():
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    data = tokens_of(7, 8).tobytes()
    assert pool.share(first, ROOT, data) == first
    assert pool.share(second, ROOT, data) == first
    assert pool.available == 2
    pool.release(first)
    assert pool.available == 2 and pool.cached == 0
    pool.release(first)
    assert pool.available == 4 and pool.cached == 2


def test_the_least_recently_used_leaf_is_evicted_first():
    pool = BlockPool(4)
    old = fill(pool, 1, 2)
    new = fill(pool, 3, 4)
    pool.release(old)
    pool.release(new)
    pool.release(fill(pool, 1, 2))  # used again
    assert pool.allocate(4) == [new[1], new[0], old[1], old[0]]
    assert pool.match(tokens_of(1, 2), 10**9) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 5)), max_size=60))
def test_counts_add_up_and_parents_outlive_children(actions):
    pool, held = BlockPool(9), []
    for action in actions:
        if isinstance(action, int):
            if held:
                pool.release(held.pop(action % len(held)))
        else:
            prefix = pool.match(tokens_of(*action), 10**9)
            if len(action) - len(prefix) + pool.idle_among(prefix) <= pool.available:
                held.append(fill(pool, *action))
        references = [0] * 9
        for blocks in held:
            for block in blocks:
                references[block] += 1
        assert pool._references == references
        assert pool.available == references.count(0)
        serials = {ONE_TENANT} | {pool._serials[block] for block in pool._shared.values()}
        assert all(parent in serials for parent, _ in pool._shared), (
            "a known block whose parent is not known can never be found"
        )


def test_a_block_knows_how_long_the_last_sequence_was_that_left_it():
    pool = BlockPool(4)
    first = fill(pool, 1, 2)
    assert pool.last_length(first[0]) == 0  # it still runs
    pool.release(first, 2 * BLOCK_TOKENS + 7)
    assert pool.last_length(first[1]) == 2 * BLOCK_TOKENS + 7
    pool.release(fill(pool, 1), BLOCK_TOKENS + 1)
    assert [pool.last_length(block) for block in first] == [BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS + 7]
    assert [pool.last_length(block) for block in pool.allocate(4)] == [0] * 4

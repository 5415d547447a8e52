"""Reductions of every level of instructions, bit by bit: bfloat16 as whole numbers round it, with the CPUs'
treatment of what is not normal.
"""

from itertools import product

import numpy as np
import pytest

from ckdist import native
from tests.support.cases import cases
from tests.support.levels import BF16 as BF16_LEVELS
from tests.support.levels import each

F32, BF16, F16 = 0, 1, 2
SUM, MAX = 0, 1
SAME, WIDEN, NARROW = 0, 1, 2
LENGTHS = (1, 63, 64, 130, 4096 + 77)


def rounded(x):
    """float32 to the bits of bfloat16: nearest even; NaNs stay and become quiet; what is below the normal range
    becomes zero.
    """
    bits = x.view(np.uint32).astype(np.uint64)
    near = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    small = bits & 0x7F800000 == 0
    return np.where(np.isnan(x), bits >> 16 | 0x40, np.where(small, bits >> 16 & 0x8000, near)).astype(np.uint16)


def floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fold(isa, element, op, form, parts, out):
    pointers = native.ffi.new("void *[]", [native.pointer(part) for part in parts])
    native.check(
        native.lib.ckdist_fold(isa.encode(), element, op, form, pointers, len(parts), len(out), native.pointer(out))
    )
    return out


def hard(n, seed=0):
    """float32 of every kind: halfway between two bfloat16 or next to it, denormals, zeros, infinities, NaNs with a
    payload.
    """
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, n, np.uint64).astype(np.uint32)
    low = rng.choice(np.array([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32), n)
    bits = np.where(rng.random(n) < 0.7, bits & 0xFFFF0000 | low, bits)
    special = np.array(
        [
            0,
            1 << 31,
            0x7F800000,
            0xFF800000,
            0x7F800001,
            0xFFBFFFFF,
            0x7FC00001,
            0x007FFFFF,
            0x80000001,
            0x00800000,
            0x7F7FFFFF,
        ],
        np.uint32,
    )
    bits[: len(special)] = special[:n]
    return bits.view(np.float32)


@cases("isa, n", product(each(BF16_LEVELS), LENGTHS))
def test_bfloat16_is_rounded_as_the_instruction_does(isa, n):
    x = hard(n)
    np.testing.assert_array_equal(fold(isa, BF16, SUM, NARROW, [x], np.empty(n, np.uint16)), rounded(x))
    halves = x.view(np.uint32)[:, None].view(np.uint16)[:, 1].copy()
    np.testing.assert_array_equal(
        fold(isa, BF16, SUM, WIDEN, [halves], np.empty(n, np.float32)).view(np.uint32), floats(halves).view(np.uint32)
    )
    np.testing.assert_array_equal(
        fold(isa, BF16, MAX, SAME, [halves, halves], np.empty(n, np.uint16)), rounded(floats(halves))
    )


@pytest.mark.parametrize("isa", each(BF16_LEVELS))
def test_bfloat16_is_added_in_float32_and_rounded_once(isa):
    parts = [rounded(np.random.default_rng(seed).normal(size=1001).astype(np.float32)) for seed in range(3)]
    exact = floats(parts[0]) + floats(parts[1]) + floats(parts[2])
    np.testing.assert_array_equal(fold(isa, BF16, SUM, SAME, parts, np.empty(1001, np.uint16)), rounded(exact))


@pytest.mark.parametrize("isa", each(BF16_LEVELS))
def test_hard_sums_of_bfloat16(isa):
    parts = [hard(4096 + 77, seed).view(np.uint32)[:, None].view(np.uint16)[:, 1].copy() for seed in range(2)]
    # small
    parts = [
        np.where(np.random.default_rng(seed).random(len(p)) < 0.2, p & 0x81FF, p).astype(np.uint16)
        for seed, p in enumerate(parts)
    ]
    parts[1][:7], parts[1][7:300] = 0, parts[0][7:300] ^ 0x8001  # nearly the opposite: what is left is small
    with np.errstate(all="ignore"):
        exact = floats(parts[0]) + floats(parts[1])
    found = fold(isa, BF16, SUM, SAME, parts, np.empty(len(exact), np.uint16))
    numbers = ~np.isnan(exact)  # of two NaNs either may be kept
    np.testing.assert_array_equal(found[numbers], rounded(exact)[numbers])
    assert np.isnan(floats(found)[~numbers]).all() and np.count_nonzero(found == 0) > 10

"""Quantised rows: the same bytes on every ISA, and Q4_K's search against the same search in numpy, sum by sum in
float32.
"""

import numpy as np
import pytest

from ckdist.native import check, lib, pointer
from tests.support.levels import HERE, VECTORS, each
from tests.support.products import block_of, number

F = np.float32


def quantized(isa, name, x):
    elements, size = block_of(name)
    out = np.zeros((x.shape[0], x.shape[1] // elements * size), np.uint8)
    check(
        lib.ckdist_quantize(
            isa.encode(), number(name), *x.shape, pointer(x, "float *"), pointer(out, "uint8_t *"), out.size
        )
    )
    return out


def rows(seed, count, cols):
    """Rows of many kinds: of one sign, sparse, in steps, of a wide range, shifted, constant, zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, cols))
    kinds = (
        np.abs,
        lambda v: -np.abs(v),
        lambda v: v * (rng.random(v.shape) < 0.05),
        lambda v: np.round(2 * v) / 2,
        lambda v: v * np.exp(6 * rng.normal(size=v.shape)),
        lambda v: v + 5,
        lambda v: np.full_like(v, v[0]),
        np.zeros_like,
    )
    for i, kind in enumerate(kinds):
        x[i :: len(kinds) + 1] = [kind(row) for row in x[i :: len(kinds) + 1]]
    scale = 10.0 ** rng.integers(-8, 3, (count, 1))
    return np.clip(x * scale, -6e4, 6e4).astype(F)


def nearest(v):
    return np.floor(np.clip(np.nan_to_num(v, nan=0), F(0), F(15)) + F(0.5))


def in_order(terms):
    total = np.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def chained(v):
    """Sums over groups of 32, (32, groups), in eight chains."""
    c = [in_order(v[i::8]) for i in range(8)]
    return ((c[0] + c[4]) + (c[2] + c[6])) + ((c[1] + c[5]) + (c[3] + c[7]))


def inverse(scale):
    return np.where(scale > 0, F(1) / scale, F(0))


def error(x, w, scale, minimum):
    d = scale * nearest((x + minimum) * inverse(scale)) - minimum - x
    return chained(w * d * d)


def searched_q4_k(values):
    """(blocks, 256) into (blocks, 144)."""
    unit = np.abs(values).max(1)
    safe = np.where(unit > 0, unit, F(1))
    x = np.ascontiguousarray((values / safe[:, None]).reshape(-1, 32).T)  # (32, groups)
    w = np.sqrt(in_order(x * x) / F(32)) + np.abs(x)
    low, high = np.minimum(x.min(0), F(0)), np.maximum(x.max(0), F(0))
    best = [(high - low) / F(15), -low]
    least = error(x, w, *best)
    sw, swx = in_order(w), in_order(w * x)
    for trial in range(9):
        q = nearest((x - low) * (F(14 + trial / 4) / (high - low)))
        wq, wqq, wqx = chained(w * q), chained(w * q * q), chained(w * q * x)
        det = sw * wqq - wq * wq
        scale, minimum = (sw * wqx - wq * swx) / det, (wq * wqx - wqq * swx) / det
        alone = ~(det > 0) | (minimum < 0)
        scale, minimum = np.where(alone, np.where(wqq > 0, wqx / wqq, F(0)), scale), np.where(alone, F(0), minimum)
        scale = np.where(scale >= 0, scale, F(0))
        e = error(x, w, scale, minimum)
        better = e < least
        best, least = [np.where(better, scale, best[0]), np.where(better, minimum, best[1])], np.where(better, e, least)
    best = [np.where(high > low, part, F(0)) for part in best]
    halves = [(np.abs(part).reshape(-1, 8).max(1) * safe / F(63)).astype(np.float16) for part in best]
    steps = [np.repeat(half.astype(F) / safe, 8) for half in halves]
    near = [np.where(step > 0, np.floor(part / step + F(0.5)), F(0)) for part, step in zip(best, steps, strict=True)]
    least, chosen = np.full_like(near[0], np.inf), [np.zeros_like(near[0])] * 2
    for i in (-1, 0, 1):
        for j in (-1, 0, 1):
            tried = [np.clip(part + F(by), F(0), F(63)) for part, by in zip(near, (i, j), strict=True)]
            e = error(x, w, *(step * part for step, part in zip(steps, tried, strict=True)))
            better = e < least
            chosen, least = (
                [np.where(better, new, old) for new, old in zip(tried, chosen, strict=True)],
                np.where(better, e, least),
            )
    codes = nearest((x + steps[1] * chosen[1]) * inverse(steps[0] * chosen[0])).astype(np.uint8).T.reshape(-1, 4, 2, 32)
    s, m = (part.astype(np.uint8).reshape(-1, 8) for part in chosen)
    sub = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | m[:, 4:] << 4]
    return np.concatenate(
        [half.view(np.uint8).reshape(-1, 2) for half in halves]
        + sub
        + [(codes[:, :, 0] | codes[:, :, 1] << 4).reshape(-1, 128)],
        1,
    )


@pytest.mark.parametrize("isa", each(VECTORS))
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_q4_k_is_searched_as_in_numpy(isa, blocks):
    x = rows(blocks, 90, 256 * blocks)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(quantized(isa, "Q4_K", x), searched_q4_k(x.reshape(-1, 256)).reshape(90, -1))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0"])
def test_the_same_bytes_on_every_isa(name):
    x = rows(9, 90, 768)
    for isa in HERE:
        np.testing.assert_array_equal(quantized(isa, name, x), quantized("baseline", name, x))

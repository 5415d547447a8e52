"""Row-wise kernels of every ISA against float64 numpy, over lengths that end in every part of a vector."""

import math
from itertools import product

import numpy as np
import pytest

from ckdist import errors, native
from ckdist.program.ops.elementwise import GATES, gate_number
from tests.support.cases import cases
from tests.support.levels import VECTORS, each
from tests.support.pairs import paired

LENGTHS = [1, 7, 16, 17, 63, 64, 65, 130, 1024, 1025, 4099]
LEVELS = [level.encode() for level in each(VECTORS)]
F32 = np.float32


def floats(array):
    return native.pointer(array, "float *")


def call(name, *args):
    return native.check(getattr(native.lib, f"ckdist_{name}")(*args))


@cases("isa, n", product(LEVELS, LENGTHS))
def test_rms_norm(isa, n):
    rng = np.random.default_rng(7)
    x, weight = rng.normal(size=(2, n)).astype(F32)
    want = x / np.sqrt(np.mean(x.astype(float) ** 2) + 1e-5) * weight
    out = np.full(n + 4, 99, F32)
    call("rms_norm", isa, floats(x), floats(weight), 1e-5, n, floats(out))
    np.testing.assert_allclose(out[:n], want, rtol=3e-6)
    assert (out[n:] == 99).all()
    call("rms_norm", isa, floats(x), floats(weight), 1e-5, n, floats(x))
    np.testing.assert_array_equal(x, out[:n])


@cases(*paired({"isa": LEVELS, "n": LENGTHS, "with_x": [False, True]}))
def test_sum_parts_adds_in_order(isa, n, with_x):
    rng = np.random.default_rng(7)
    x = rng.normal(size=n).astype(F32) * 1e3
    parts = rng.normal(size=(3, n)).astype(F32)
    want = x.copy() if with_x else parts[0].copy()
    for part in parts if with_x else parts[1:]:
        want += part
    pointers = native.ffi.new("float *[]", [floats(p) for p in parts])
    out = np.empty(n, F32)
    call("sum_parts", isa, floats(x) if with_x else native.ffi.NULL, pointers, 3, n, floats(out))
    np.testing.assert_array_equal(out, want)


@cases("isa, head_dim", product(LEVELS, [8, 64, 80, 96, 128, 256]))
def test_rope_rotates_halves(isa, head_dim):
    rng = np.random.default_rng(7)
    x = rng.normal(size=head_dim).astype(F32)
    angle = rng.uniform(0, 6, head_dim // 2)
    cos, sin = np.cos(angle).astype(F32), np.sin(angle).astype(F32)
    a, b = x[: head_dim // 2].astype(float), x[head_dim // 2 :].astype(float)
    want = np.concatenate([a * cos - b * sin, b * cos + a * sin])
    call("rope", isa, floats(x), floats(cos), floats(sin), head_dim, floats(x))
    np.testing.assert_allclose(x, want, atol=5e-7)


@cases(*paired({"isa": LEVELS, "n": LENGTHS, "biased": [False, True]}))
def test_layer_norm(isa, n, biased):
    rng = np.random.default_rng(7)
    x, weight, bias, out = (np.asarray(rng.normal(size=n) * 3 + 5, F32) for _ in range(4))
    call(
        "layer_norm", isa, floats(x), floats(weight), floats(bias) if biased else native.ffi.NULL, 1e-5, n, floats(out)
    )
    centred = x.astype(float) - x.astype(float).mean()
    want = centred / np.sqrt((centred**2).mean() + 1e-5) * weight + bias * biased
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4)


@cases(*paired({"isa": LEVELS, "n": LENGTHS, "function": [0, 1, 4]}))
def test_gated(isa, n, function):
    rng = np.random.default_rng(7)
    gate = (rng.normal(size=n) * 4).astype(F32)
    up = rng.normal(size=n).astype(F32)
    g = gate.astype(float)
    f = g / (1 + np.exp(-g)) if function == 0 else 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    if function == 4:
        f = 0.5 * g * (1 + np.vectorize(math.erf)(g / np.sqrt(2)))
    out = np.empty(n, F32)
    call("gated", isa, function, floats(gate), floats(up), n, floats(out))
    np.testing.assert_allclose(out, f * up, rtol=2e-6, atol=1e-6)


@cases("isa, n", product(LEVELS, LENGTHS))
def test_clamped_swiglu(isa, n):
    """Against what PyTorch's clamp, sigmoid and products mean, in float64."""
    rng = np.random.default_rng(7)
    gate, up = (rng.normal(size=(2, n)) * 6).astype(F32)
    g, u = np.minimum(gate.astype(float), 7), np.clip(up.astype(float), -7, 7)
    out = np.empty(n, F32)
    call("gated", isa, 3, floats(gate), floats(up), n, floats(out))
    np.testing.assert_allclose(out, (u + 1) * g / (1 + np.exp(-1.702 * g)), rtol=2e-6, atol=1e-6)
    out = np.empty(4, F32)
    far = [np.array(x, F32) for x in ([-3e38, 3e38, np.nan, 1], [1, 3e38, 1, np.nan])]
    call("gated", isa, 3, floats(far[0]), floats(far[1]), 4, floats(out))
    np.testing.assert_allclose(out, [0, 56 / (1 + np.exp(-1.702 * 7)), np.nan, np.nan], rtol=1e-6)


@cases(*paired({"isa": LEVELS, "n": LENGTHS}))
def test_softplus(isa, n):
    rng = np.random.default_rng(7)
    gate, up = (rng.normal(size=(2, n)) * 6).astype(F32)
    gate[:4] = np.array([-80, 80, 3e38, 0], F32)[:n]
    out = np.empty(n, F32)
    call("gated", isa, GATES["softplus"], floats(gate), floats(up), n, floats(out))
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(out, np.logaddexp(0, gate.astype(float)).astype(F32) * up, rtol=2e-6)


@cases(*paired({"isa": LEVELS, "n": LENGTHS, "limit": [0.0625, 1, 7]}))
def test_limited_silu(isa, n, limit):
    rng = np.random.default_rng(7)
    gate, up = (rng.normal(size=(2, n)) * 6).astype(F32)
    g = gate.astype(float)
    out = np.empty(n, F32)
    call("gated", isa, gate_number("silu", limit), floats(gate), floats(up), n, floats(out))
    want = np.minimum(g / (1 + np.exp(-g)), limit) * np.clip(up, -limit, limit)
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=1e-6)


@cases("isa", LEVELS)
def test_gated_far_out_and_nan(isa):
    gate = np.array([-200, -90, 90, 200, np.nan, 0, -0.0, 3e38], F32)
    for function in (0, 1, 4):
        out = np.empty(8, F32)
        call("gated", isa, function, floats(gate), floats(np.ones(8, F32)), 8, floats(out))
        np.testing.assert_array_equal(out, np.array([0, 0, 90, 200, np.nan, 0, 0, 3e38], F32))


@cases("isa", LEVELS)
def test_tanh_within_two_units_in_the_last_place(isa):
    x = np.concatenate([np.linspace(-12, 12, 100_001), np.geomspace(1e-30, 1, 5000), [0, 1e30, -np.inf]]).astype(F32)
    y = x.copy()
    call("soft_cap", isa, floats(y), 1.0, y.size)
    want = np.tanh(x.astype(float))
    assert np.max(np.abs(y - want) / np.spacing(np.abs(want).astype(F32))) <= 2.5
    capped = x.copy()
    call("soft_cap", isa, floats(capped), 30.0, x.size)
    np.testing.assert_allclose(capped, 30 * np.tanh(x.astype(float) / 30), rtol=4e-7)


@cases("isa", LEVELS)
def test_exp_within_two_units_in_the_last_place(isa):
    x = np.concatenate([np.linspace(-87.3, 88.7, 200_001), np.linspace(-1, 1, 20_001)]).astype(F32)
    y, total = np.empty_like(x), native.ffi.new("double *")
    call("sum_exp", isa, floats(x), x.size, 0.0, 1.0, floats(y), total)
    want = np.exp(x.astype(float))
    assert np.max(np.abs(y - want) / np.spacing(want.astype(F32))) <= 1.5
    edges = np.array([0, -0.0, -88, -1e30, 89, np.inf, -np.inf, np.nan], F32)
    y = np.empty_like(edges)
    call("sum_exp", isa, floats(edges), edges.size, 0.0, 1.0, floats(y), total)
    np.testing.assert_array_equal(y, np.array([1, 1, 0, 0, np.inf, np.inf, 0, np.nan], F32))


@cases("isa, n", product(LEVELS, LENGTHS))
def test_sum_exp(isa, n):
    rng = np.random.default_rng(7)
    x = rng.normal(size=n).astype(F32) * 3
    total = native.ffi.new("double *")
    call("sum_exp", isa, floats(x), n, 2.0, 0.5, native.ffi.NULL, total)
    np.testing.assert_allclose(total[0], np.exp((x.astype(float) - 2) * 0.5).sum(), rtol=2e-6)


@cases("isa, n", product(LEVELS, LENGTHS))
def test_sum_at_least(isa, n):
    rng = np.random.default_rng(7)
    x, terms = np.round(rng.normal(size=n)).astype(F32), rng.exponential(size=n).astype(F32)
    total = native.ffi.new("double *")
    for threshold in (-9, 0, 1, 9):
        call("sum_at_least", isa, floats(x), floats(terms), n, threshold, total)
        np.testing.assert_allclose(total[0], terms[x >= threshold].astype(float).sum(), rtol=2e-6)


@cases("isa, n", product(LEVELS, LENGTHS))
def test_add(isa, n):
    rng = np.random.default_rng(7)
    x, out = rng.normal(size=(2, n)).astype(F32)
    want = out + x
    call("add", isa, floats(x), n, floats(out))
    np.testing.assert_array_equal(out, want)


@cases("isa, n", product(LEVELS, LENGTHS))
def test_maxima_are_strided(isa, n):
    rng = np.random.default_rng(7)
    x = -rng.exponential(size=n).astype(F32)
    spans = -(-n // 1024)
    padded = np.full(spans * 1024, -np.inf, F32)
    padded[:n] = x
    out = np.empty((spans, 16), F32)
    assert call("maxima", isa, floats(x), n, floats(out)) == 1
    np.testing.assert_array_equal(out, padded.reshape(spans, 64, 16).max(1))
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = x.copy()
        spoilt[n // 2] = bad
        assert call("maxima", isa, floats(spoilt), n, floats(out)) == 0
    words = rng.integers(0, 2**32, size=-(-n // 32), dtype=np.uint32)
    kept = np.empty(n, F32)
    masked = [floats(x), native.pointer(words, "uint32_t *"), -1e30, n, floats(kept), floats(out)]
    assert call("maxima_allowed", isa, *masked) == 1
    allowed = np.unpackbits(words.view(np.uint8), count=n, bitorder="little").astype(bool)
    np.testing.assert_array_equal(kept, np.where(allowed, x, F32(-1e30)))
    padded[:n] = kept
    np.testing.assert_array_equal(out, padded.reshape(spans, 64, 16).max(1))
    x[n // 2] = np.nan
    assert call("maxima_allowed", isa, *masked) == 0


@cases(
    "isa, cols, lead, n",
    [(isa, *sizes) for isa in LEVELS for sizes in ((256, 0, 256), (300, 0, 300), (512, 40, 100), (64, 63, 1))],
)
def test_prepare(isa, cols, lead, n):
    rng = np.random.default_rng(7)
    x = rng.normal(size=n).astype(F32)
    padded = -(-cols // 256) * 256
    full = np.zeros(padded, F32)
    full[lead : lead + n] = x
    row = np.full(4 * padded, 0xFF, np.uint8)

    def prepare(kind: int) -> None:
        stride = native.lib.ckdist_activation_bytes(kind, cols)
        call("prepare", isa, kind, floats(x), 1, n, lead, cols, native.pointer(row, "uint8_t *"), stride)

    prepare(0)
    np.testing.assert_array_equal(row.view(F32), full)
    prepare(1)
    halves = (row[: 2 * padded].view(np.uint16).astype(np.uint32) << 16).view(F32)
    np.testing.assert_allclose(halves, full, rtol=2.0**-8)
    prepare(2)
    codes = row[:padded].view(np.int8).astype(int)
    scales = row[padded : padded + padded // 8].view(F32)
    sums = row[padded + padded // 8 : padded + padded // 4].view(np.int32)
    np.testing.assert_array_equal(sums, -128 * codes.reshape(-1, 32).sum(1))
    sums = row[padded + padded // 4 : padded + padded // 2].view(np.int32)
    np.testing.assert_array_equal(sums, -32 * codes.reshape(-1, 16).sum(1))
    assert np.all(np.abs(codes.reshape(-1, 32) * scales[:, None] - full.reshape(-1, 32)) <= 0.501 * scales[:, None])


def test_unknown_isa_is_refused():
    with pytest.raises(errors.ConfigError, match="sse9"):
        call("add", b"sse9", native.ffi.NULL, 0, native.ffi.NULL)

"""Attention of every ISA and KV type against float64 numpy, and its bits against themselves under other cuts of the
work.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from ckdist import errors, native
from tests.support.cases import cases
from tests.support.levels import HERE, INTEGERS, each
from tests.support.pairs import paired

F32 = np.float32
# Largest error against float64 where queries and keys have a spread of 2 (scores of 4). Integer arithmetic rounds
# queries and weights to codes of 16 bits; i16 is compared with what was given, so that its error includes the cache's
# own (f16's would be 5e-3, bf16's 4e-2).
TOLERANCE = {"f32": 2e-5, "f16": 2e-5, "bf16": 2e-5, "q8_0": 3e-3, "q4_0": 3e-3, "i16": 4e-3}
# Levels with a dot product of integers, and those whose vectors they have.
PAIRS_OF_LEVELS = [
    ("avx2_vnni", "avx2"),
    ("avx512_vnni", "avx512"),
    ("amx", "avx512"),
    ("neon_dotprod", "neon"),
    ("neon_i8mm", "neon"),
]
TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "i16": 25, "bf16": 30}
LEVELS = [level.encode() for level in each(INTEGERS)]
# A level has code of its own for each type, so most tests pair each kernel with every shape.
KERNELS = list(product(LEVELS, TYPES))


def floats(array):
    return native.ffi.cast("float *", array.ctypes.data)


class Cache:
    """One kv-head's blocks in a shuffled order, holes filled with NaN patterns; k, v: (positions, head_dim) float32."""

    def __init__(self, isa, kv_type, k, v, seed=0, latent=False):
        key_type, _, value_type = kv_type.partition("/")
        self.isa = isa
        types = [TYPES[key_type], TYPES[value_type or key_type]]
        self.shape = native.ffi.new("struct ckdist_cache_shape *", [*types, k.shape[1], v.shape[1], latent])
        self.stride = native.check(native.lib.ckdist_attention_block_bytes(isa, self.shape))
        used = -(-len(k) // 16)
        self.table = np.random.default_rng(seed).permutation(used + 3).astype(np.int32)[:used].copy()
        self.bytes = np.full((used + 3) * self.stride, 0xFF, np.uint8)
        store, blocks = native.lib.ckdist_attention_store, native.ffi.cast("uint8_t *", self.bytes.ctypes.data)
        keys, values = np.ascontiguousarray(k), np.ascontiguousarray(v)
        key, value = floats(keys), floats(values)
        for p in range(len(k)):
            block = blocks + int(self.table[p // 16]) * self.stride
            native.check(store(isa, self.shape, block, p % 16, key + p * k.shape[1], value + p * v.shape[1]))


@dataclass(frozen=True)
class Settings:
    scale: float = 0.1
    soft_cap: float = 0.0
    window: int = 0
    context: int = 0
    sinks: tuple[float, ...] = ()  # of each head


def attend(cache, q, first, settings, spans=0, library=native.lib):
    """q: (tokens, heads, head_dim); the same shape comes back. spans: of 256 positions at a time, merged; 0: in one
    go.
    """
    tokens, heads, head_dim = q.shape
    width = cache.shape.value_width
    out = np.full((tokens, heads, width), 7, F32)
    task = native.ffi.new("struct ckdist_attention_task *")
    task.cache = cache.shape[0]
    task.kv, task.block_stride = native.ffi.cast("uint8_t *", cache.bytes.ctypes.data), cache.stride
    task.block_table = native.ffi.cast("int32_t *", cache.table.ctypes.data)
    task.first_position, task.tokens, task.heads = first, tokens, heads
    task.q, task.q_token_stride, task.q_head_stride = floats(q), heads * head_dim, head_dim
    task.out, task.out_token_stride, task.out_head_stride = floats(out), heads * width, width
    task.scale, task.soft_cap, task.window = settings.scale, settings.soft_cap, settings.window
    task.context = settings.context
    sinks = np.array(settings.sinks, F32)
    task.sinks = floats(sinks) if settings.sinks else native.ffi.NULL
    size = native.check(library.ckdist_attention_scratch_bytes(cache.isa, cache.shape, tokens, heads))
    scratch = np.full(size + 64, 0xFF, np.uint8)  # NaN patterns: nothing may be read before it is written
    start = -scratch.ctypes.data % 64
    at = native.ffi.cast("uint8_t *", scratch.ctypes.data + start)
    if spans:
        native.check(library.ckdist_attend_in_parts(cache.isa, task, spans, at))
    else:
        native.check(library.ckdist_attend(cache.isa, task, at))
    return out


def reference(k, v, q, first, settings):
    k, v, q = (a.astype(float) for a in (k, v, q))
    out = np.empty((*q.shape[:2], v.shape[1]))
    for t in range(q.shape[0]):
        position = first + t
        low = max(0, position + 1 - settings.window) if settings.window else 0
        high = min(settings.context, position + (settings.window or len(k))) if settings.context else position + 1
        scores = q[t] @ k[low:high].T * settings.scale  # (heads, seen)
        if settings.soft_cap:
            scores = settings.soft_cap * np.tanh(scores / settings.soft_cap)
        if settings.sinks:
            scores = np.concatenate([scores, np.array(settings.sinks)[:, None]], axis=1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[t] = weights[:, : high - low] @ v[low:high]
    return out


def rounded(kv_type, x):
    """What the cache keeps of x (positions, head_dim), made independently of the kernels; of i16, what it was given."""
    if kv_type in ("f32", "i16"):
        return x
    if kv_type == "f16":
        return x.astype(np.float16).astype(F32)
    if kv_type == "bf16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(F32)
    group = 32 if x.shape[1] % 32 == 0 else x.shape[1]
    g = hadamard(x).reshape(len(x), -1, group)
    scale = (np.abs(g).max(-1, keepdims=True) / F32(127 if kv_type == "q8_0" else 16)).astype(np.float16).astype(F32)
    units = g * (F32(1) / np.where(scale > 0, scale, np.inf))
    codes = np.rint(units) if kv_type == "q8_0" else 2 * np.clip(np.rint(units / 2 - F32(0.5)), -8, 7) + 1
    return hadamard((np.clip(codes, -127, 127) * scale).astype(F32).reshape(x.shape))


def hadamard(x):
    """The transform of each block of a row, whose length is the largest power of two that divides the row's."""
    block = x.shape[1] & -x.shape[1]
    y = x.reshape(len(x), -1, block).copy()
    least = min(block, 16)
    signs = np.array([[(-1) ** (i & j).bit_count() for j in range(least)] for i in range(least)], F32)
    parts, y = y.reshape(len(x), -1, least), 0
    for j in range(least):  # in the order of the kernel, so that no code is rounded to another side
        y = y + parts[..., j : j + 1] * signs[j]
    y = (y * (F32(1) / np.sqrt(F32(block)))).reshape(len(x), -1, block)
    step = least
    while step < block:
        pairs = y.reshape(len(x), -1, 2, step)
        y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        step *= 2
    return y.reshape(x.shape)


def random_case(head_dim, positions, tokens, heads, seed=1):
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, positions, head_dim)).astype(F32) * 2
    return k, v, rng.normal(size=(tokens, heads, head_dim)).astype(F32) * 2


@cases(
    *paired(
        {
            "isa, kv_type": KERNELS,
            "head_dim": [8, 64, 72, 80, 96, 128, 256],
            "tokens, heads, positions": [(1, 1, 1), (1, 3, 200), (1, 8, 67), (16, 4, 150), (35, 1, 530)],
        }
    )
)
def test_agrees_with_reference(isa, kv_type, head_dim, tokens, heads, positions):
    k, v, q = random_case(head_dim, positions, tokens, heads)
    settings = Settings(scale=head_dim**-0.5)
    out = attend(Cache(isa, kv_type, k, v), q, positions - tokens, settings)
    want = reference(rounded(kv_type, k), rounded(kv_type, v), q, positions - tokens, settings)
    np.testing.assert_allclose(out, want, atol=TOLERANCE[kv_type])


@cases(
    *paired(
        {
            "isa, kv_type": KERNELS,
            "tokens, heads, first": [(32, 1, 288), (7, 2, 0), (1, 3, 299)],
            "window": [0, 20, 270],
        }
    )
)
def test_bidirectional(isa, kv_type, tokens, heads, first, window):
    k, v, q = random_case(64, 530, tokens, heads)
    settings = Settings(scale=1 / 8, window=window, context=530)
    cache = Cache(isa, kv_type, k, v)
    out = attend(cache, q, first, settings)
    want = reference(rounded(kv_type, k), rounded(kv_type, v), q, first, settings)
    np.testing.assert_allclose(out, want, atol=TOLERANCE[kv_type])
    np.testing.assert_array_equal(attend(cache, q, first, settings, spans=1), out)


MIXED = ["i16/q8_0", "q8_0/i16", "q8_0/f16", "f16/q8_0", "i16/f32", "bf16/i16", "f32/bf16", "f16/f32"]
MIXED += ["i16/q4_0", "q4_0/i16", "q8_0/q4_0", "q4_0/q8_0", "q4_0/f16", "f16/q4_0"]


@cases(
    *paired(
        {
            "isa, types": list(product(LEVELS, MIXED)),
            "key_width, value_width": [(64, 64), (96, 40), (72, 128)],
            "tokens, heads, positions": [(1, 3, 200), (16, 4, 150), (35, 1, 530)],
        }
    )
)
def test_keys_and_values_of_unequal_types_and_widths(isa, types, key_width, value_width, tokens, heads, positions):
    rng = np.random.default_rng(1)
    k, v = (rng.normal(size=(positions, width)).astype(F32) * 2 for width in (key_width, value_width))
    q = rng.normal(size=(tokens, heads, key_width)).astype(F32) * 2
    key_type, value_type = types.split("/")
    settings = Settings(scale=key_width**-0.5)
    cache = Cache(isa, types, k, v)
    out = attend(cache, q, positions - tokens, settings)
    want = reference(rounded(key_type, k), rounded(value_type, v), q, positions - tokens, settings)
    np.testing.assert_allclose(out, want, atol=max(TOLERANCE[key_type], TOLERANCE[value_type]))
    np.testing.assert_array_equal(attend(cache, q, positions - tokens, settings, spans=1), out)
    v[5, 0] = np.nan
    assert np.isnan(attend(Cache(isa, types, k, v), q, positions - tokens, settings)).any()


@cases(
    "level, below, integers, tokens, heads, positions",
    [
        (*levels, integers, *sizes)
        for levels in PAIRS_OF_LEVELS
        for integers in ("i16", "q8_0")
        for sizes in ((1, 3, 200), (1, 8, 700), (16, 4, 150), (35, 1, 530))
        if levels[0] in HERE
    ],
)
def test_dot_products_of_integers_have_the_bits_of_the_level_below(level, below, integers, tokens, heads, positions):
    k, v, q = random_case(128, positions, tokens, heads)
    out, plain = (
        attend(Cache(isa.encode(), integers, k, v), q, positions - tokens, Settings()) for isa in (level, below)
    )
    np.testing.assert_array_equal(out.view(np.uint32), plain.view(np.uint32))


@cases(
    *paired(
        {
            "isa, kv_type": KERNELS,
            "settings": [
                Settings(soft_cap=5),
                Settings(window=1),
                Settings(window=40),
                Settings(window=100, soft_cap=20),
            ],
            "tokens": [1, 20],
        }
    )
)
def test_soft_cap_and_window(isa, kv_type, settings, tokens):
    k, v, q = random_case(64, 210, tokens, 2)
    out = attend(Cache(isa, kv_type, k, v), q, 210 - tokens, settings)
    want = reference(rounded(kv_type, k), rounded(kv_type, v), q, 210 - tokens, settings)
    np.testing.assert_allclose(out, want, atol=TOLERANCE[kv_type])


@cases(*paired({"isa, kv_type": KERNELS, "tokens, heads": [(1, 3), (1, 8), (20, 3)], "window": [0, 40]}))
def test_sinks(isa, kv_type, tokens, heads, window):
    """Below all scores, among them, above them, and so far above that nothing else counts."""
    positions = 530
    k, v, q = random_case(64, positions, tokens, heads)
    settings = Settings(window=window, sinks=(-300.0, 5.0, 14.0, 300.0, *[1.0] * 4)[:heads])
    cache = Cache(isa, kv_type, k, v)
    out = attend(cache, q, positions - tokens, settings)
    want = reference(rounded(kv_type, k), rounded(kv_type, v), q, positions - tokens, settings)
    np.testing.assert_allclose(out, want, atol=TOLERANCE[kv_type])
    without = reference(k, v, q, positions - tokens, Settings(window=window))
    assert np.abs(want[:, 2]).max() < 0.5 * np.abs(without).max()
    np.testing.assert_array_equal(attend(cache, q[-1:].copy(), positions - 1, settings)[0], out[-1])
    np.testing.assert_array_equal(attend(cache, q, positions - tokens, settings, 1), out)


@cases(
    *paired(
        {
            "isa, kv_type": KERNELS,
            "head_dim": [72, 128],
            "settings": [Settings(scale=0.3), Settings(scale=0.3, window=50, soft_cap=30)],
        }
    )
)
def test_bits_do_not_depend_on_the_cut(isa, kv_type, head_dim, settings):
    positions, heads = 270, 5
    k, v, q = random_case(head_dim, positions, positions, heads)
    cache = Cache(isa, kv_type, k, v)
    whole = attend(cache, q, 0, settings)
    other = Cache(isa, kv_type, k, v, seed=9)  # other blocks, same positions
    for cut in (1, 2, 7, 16):
        for first in range(0, positions, cut):
            if cut < 7 and 35 < first < 240:  # the borders of blocks and of spans are in the others
                continue
            part = attend(other, q[first : first + cut].copy(), first, settings)
            np.testing.assert_array_equal(part.view(np.uint32), whole[first : first + cut].view(np.uint32))
    for head in range(heads):
        np.testing.assert_array_equal(attend(cache, q[:, head : head + 1].copy(), 0, settings)[:, 0], whole[:, head])


@cases(*paired({"isa": LEVELS, "kv_type": TYPES, "heads": range(1, 10)}))
def test_bits_do_not_depend_on_who_reads_which_part(isa, kv_type, heads):
    positions = 1100
    k, v, q = random_case(64, positions, 2, heads)
    cache = Cache(isa, kv_type, k, v)
    for settings in (Settings(), Settings(window=600, soft_cap=20)):
        whole = attend(cache, q, positions - 2, settings)
        np.testing.assert_array_equal(attend(cache, q[:, -1:].copy(), positions - 2, settings)[:, 0], whole[:, -1])
        for spans in (1, 2, 4):
            np.testing.assert_array_equal(attend(cache, q, positions - 2, settings, spans), whole)


@cases("isa", LEVELS)
def test_precision_of_integers(isa):
    """i16 loses less than float16 does, q8_0's arithmetic far less than its cache; also where one dimension
    outweighs all others.
    """
    k, v, q = random_case(128, 600, 20, 2)
    for outlier in (1, 30):
        k[:, 5] *= outlier
        exact = reference(k, v, q, 580, Settings(scale=0.06))

        def rms(kv_type, want):
            return np.sqrt(np.mean((attend(Cache(isa, kv_type, k, v), q, 580, Settings(scale=0.06)) - want) ** 2))

        assert rms("i16", exact) < rms("f16", exact)
        stored = reference(rounded("q8_0", k), rounded("q8_0", v), q, 580, Settings(scale=0.06))
        assert rms("q8_0", stored) < 0.1 * rms("q8_0", exact)


@cases("isa, kv_type", product(LEVELS, ["q8_0", "q4_0"]))
def test_outliers_cost_rotated_types_less(isa, kv_type):
    """Each group of 32 has an outlier. Without a transform, its scale would be too coarse for the others."""
    v = np.random.default_rng(1).normal(size=(64, 128)).astype(F32)
    v[:, [3, 37, 77, 110]] += 15
    groups = v.reshape(64, 4, 32)
    scale = np.abs(groups).max(-1, keepdims=True) / (8 if kv_type == "q4_0" else 127)
    plain = np.rint(groups / scale) * scale - groups
    error = (
        attend(Cache(isa, kv_type, np.zeros_like(v), v), np.ones((64, 1, 128), F32), 0, Settings(window=1))[:, 0] - v
    )
    assert np.square(error).mean() < 0.5 * np.square(plain).mean()


@cases("kv_type", ["i16", "q8_0", "q4_0"])
def test_the_last_of_131072_positions(kv_type):
    positions, tokens, times = 1 << 17, 3, 128
    k, v, q = random_case(32, positions // times, tokens, 4)  # the blocks are repeated
    settings = Settings(scale=1 / 8)
    cache = Cache(native.ffi.NULL, kv_type, k, v)
    cache.table = np.tile(cache.table, times)
    out = attend(cache, q, positions - tokens, settings)
    k, v = (np.tile(rounded(kv_type, x), (times, 1)) for x in (k, v))
    np.testing.assert_allclose(out, reference(k, v, q, positions - tokens, settings), atol=TOLERANCE[kv_type])
    np.testing.assert_array_equal(attend(cache, q, positions - tokens, settings, spans=8), out)


@cases("isa, kv_type", KERNELS)
def test_blocks_outside_the_window_are_not_touched(isa, kv_type):
    k, v, q = random_case(64, 200, 1, 2)
    cache = Cache(isa, kv_type, k, v)
    want = attend(cache, q, 199, Settings(window=33))
    for table_entry in range((200 - 33) // 16):
        cache.table[table_entry] = 1 << 28
    np.testing.assert_array_equal(attend(cache, q, 199, Settings(window=33)), want)


@cases("isa, kv_type", KERNELS)
def test_later_positions_are_not_seen(isa, kv_type):
    k, v, q = random_case(64, 100, 8, 2)
    before = attend(Cache(isa, kv_type, k, v), q, 40, Settings())
    k[48:], v[48:] = np.nan, np.nan
    np.testing.assert_array_equal(attend(Cache(isa, kv_type, k, v), q, 40, Settings()), before)


@cases("isa, kv_type", KERNELS)
def test_large_scores_stay_finite_and_nan_stays_visible(isa, kv_type):
    k, v, q = random_case(64, 90, 1, 1)
    out = attend(Cache(isa, kv_type, k * 1000, v), q * 100, 89, Settings(scale=1))
    want = reference(rounded(kv_type, k * 1000), rounded(kv_type, v), q * 100, 89, Settings(scale=1))
    np.testing.assert_allclose(out, want, atol=3e-4 if kv_type == "i16" else 1e-4)  # i16: half a step of values up to 8
    k[3, 5] = np.nan
    assert np.isnan(attend(Cache(isa, kv_type, k, v), q, 89, Settings())).all()


@cases("isa", LEVELS)
def test_keys_beyond_float16_saturate(isa):
    k, v, q = random_case(64, 3, 1, 1)
    v[1, 7] = 1e6
    assert np.isfinite(attend(Cache(isa, "f16", k, v), q, 2, Settings())).all()


@cases("isa, kv_type", KERNELS)
def test_every_magnitude_is_rounded_to_nearest_even(isa, kv_type):
    rng = np.random.default_rng(3)
    v = (rng.normal(size=(64, 64)) * 2.0 ** rng.integers(-28, 15, (64, 1))).astype(F32)
    if kv_type == "f16":  # halfway between neighbours, subnormal ones included
        v[:32] = (np.arange(32 * 64).reshape(32, 64) + 0.5) * 2.0**-24
    if kv_type in ("q8_0", "q4_0"):  # a subnormal scale has few bits
        v[np.abs(v).max(1) < 0.02] = 1
    q = np.ones((64, 1, 64), F32)
    out = attend(Cache(isa, kv_type, np.zeros_like(v), v), q, 0, Settings(window=1))[:, 0]  # each sees itself alone
    if kv_type == "i16":
        assert (np.abs(out - v).max(1) <= np.abs(v).max(1) / 16383 * 0.501).all()
    elif kv_type in ("q8_0", "q4_0"):  # the transform of a row has sums of all its elements
        assert (np.abs(out - rounded(kv_type, v)).max(1) <= 1e-6 * np.abs(v).max(1)).all()
    else:
        np.testing.assert_array_equal(out, rounded(kv_type, v))


@cases("isa, kv_type", KERNELS)
def test_a_block_has_the_bytes_of_its_positions(isa, kv_type):
    rng = np.random.default_rng(3)
    for key_width, value_width in (128, 64), (80, 96):
        k, v = rng.normal(size=(16, key_width)).astype(F32), rng.normal(size=(16, value_width)).astype(F32)
        k[3], v[4], k[5, 7], v[6, 9] = 0, 0, np.nan, np.inf
        one_by_one = Cache(isa, kv_type, k, v)
        together = np.full(one_by_one.stride, 0xFF, np.uint8)
        block = native.ffi.cast("uint8_t *", together.ctypes.data)
        native.check(native.lib.ckdist_attention_store_block(isa, one_by_one.shape, block, floats(k), floats(v)))
        start = int(one_by_one.table[0]) * one_by_one.stride
        np.testing.assert_array_equal(together, one_by_one.bytes[start : start + one_by_one.stride])


@cases("isa, kv_type", KERNELS)
def test_block_bytes_are_whole_cache_lines(isa, kv_type):
    for width in range(8, 264, 8):
        assert block_bytes(isa, TYPES[kv_type], 8, width, 264 - width) % 64 == 0
    assert block_bytes(isa, 8, 8, 128, 128) == 2 * (128 * 16 + 4 * 16 * 2)
    assert block_bytes(isa, 2, 2, 128, 128) == 2 * (128 * 16 // 2 + 4 * 16 * 2)
    assert block_bytes(isa, 25, 25, 128, 128) == 2 * (128 * 16 * 2 + 16 * 4)
    assert block_bytes(isa, 25, 8, 128, 128) == 128 * 16 * 2 + 16 * 4 + 128 * 16 + 4 * 16 * 2


def block_bytes(isa, *shape):
    """Of a cache of these types and widths of keys and values."""
    shape = native.ffi.new("struct ckdist_cache_shape *", shape)
    return native.check(native.lib.ckdist_attention_block_bytes(isa, shape))


@cases("isa", LEVELS)
def test_wrong_shapes_are_refused(isa):
    with pytest.raises(errors.ConfigError, match=r"width of a head .12."):
        block_bytes(isa, 1, 1, 64, 12)
    with pytest.raises(errors.ConfigError, match="KV type 3"):
        block_bytes(isa, 1, 3, 64, 64)


LATENT = [(40, 8), (32, 16), (96, 32), (512, 64)]  # elements of the latent vector, and behind it


def latent_case(latent, rotated, positions, tokens, heads):
    """Keys whose rotated part is much larger than the latent one, as trained models have it."""
    rng = np.random.default_rng(2)
    k = rng.normal(size=(positions, latent + rotated)).astype(F32)
    q = rng.normal(size=(tokens, heads, latent + rotated)).astype(F32)
    k[:, latent:] *= 20
    q[:, :, latent:] /= 8
    return k, q


@cases(
    *paired(
        {
            "isa, kv_type": KERNELS,
            "latent, rotated": LATENT,
            "tokens, heads, positions": [(1, 1, 1), (1, 3, 200), (1, 8, 67), (16, 4, 150), (35, 2, 530)],
        }
    )
)
def test_values_that_are_the_beginning_of_keys(isa, kv_type, latent, rotated, tokens, heads, positions):
    k, q = latent_case(latent, rotated, positions, tokens, heads)
    settings = Settings(scale=(latent + rotated) ** -0.5)
    out = attend(Cache(isa, kv_type, k, k[:, :latent].copy(), latent=True), q, positions - tokens, settings)
    kept = np.concatenate([rounded(kv_type, part.copy()) for part in (k[:, :latent], k[:, latent:])], axis=1)
    want = reference(kept, kept[:, :latent], q, positions - tokens, settings)
    np.testing.assert_allclose(out, want, atol=TOLERANCE[kv_type])


@cases(*paired({"isa": LEVELS, "kv_type": TYPES, "latent, rotated": [(40, 8), (96, 32)]}))
def test_latent_bits_do_not_depend_on_the_division_of_work(isa, kv_type, latent, rotated):
    k, q = latent_case(latent, rotated, 600, 40, 6)
    cache, settings = Cache(isa, kv_type, k, k[:, :latent].copy(), latent=True), Settings(0.1)
    whole = attend(cache, q, 560, settings)
    for tokens, heads in ((1, 6), (1, 1), (7, 2), (40, 3)):
        for t in range(0, 40, tokens):
            for h in range(0, 6, heads):
                part = np.ascontiguousarray(q[t : t + tokens, h : h + heads])
                assert np.array_equal(attend(cache, part, 560 + t, settings), whole[t : t + tokens, h : h + heads])
    assert np.array_equal(attend(cache, q, 560, settings, spans=2), whole)


@cases("kv_type", TYPES)
def test_latent_bits_are_those_of_every_level_of_the_same_vectors(kv_type):
    k, q = latent_case(64, 16, 300, 20, 4)
    results = {
        isa: attend(Cache(isa.encode(), kv_type, k, k[:, :64].copy(), latent=True), q, 280, Settings(0.1))
        for isa in HERE
    }
    for level, vectors in PAIRS_OF_LEVELS:
        if level in results and vectors in results:
            assert np.array_equal(results[level], results[vectors])


def test_latent_values_wider_than_keys_are_refused():
    shape = native.ffi.new("struct ckdist_cache_shape *", [25, 25, 32, 64, True])
    with pytest.raises(errors.ConfigError, match="not a part of keys of type 25 and width 32"):
        native.check(native.lib.ckdist_attention_block_bytes(native.ffi.NULL, shape))

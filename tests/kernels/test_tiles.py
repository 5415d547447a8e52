"""AMX products and attention, which few machines can run: compiled here against a model of the tile instructions, as
Intel documents them.

Products of quantised weights must have AVX-512's bits, since it takes the fewest tokens; bfloat16 has an order of its
own.
"""

import copy
import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckdist import native
from ckdist.errors import ConfigError
from ckdist.program.ops.elementwise import GATES
from tests.kernels.test_attention import Cache, Settings, attend
from tests.kernels.test_elementwise import floats
from tests.support.cases import cases
from tests.support.compiled import NATIVE
from tests.support.paths import ROOT
from tests.support.products import (
    HALF_FIELDS,
    activation_format,
    block_of,
    multiply,
    number,
    odd_columns,
    pack,
    prepare,
    random_rows,
)
from tests.support.tile_library import LIBRARY, tile_library

TOKENS = (1, 9, 10, 16, 17, 33)


@pytest.fixture(scope="module")
def tiles():
    """Functions of the library, and of the model."""
    return tile_library()


def operations(model):
    """Loads, stores and products of tiles, and rows of sums in products, since the start."""
    counts = np.empty(4, np.int64)
    model.tile_operations(ctypes.c_void_p(counts.ctypes.data))
    return counts


def in_strips(prepared):
    """Rows of bfloat16 in strips of 16 rows, [column / 32][row][32 columns]. What no row fills is not finite."""
    tokens, stride = prepared.shape
    strips = np.full((-(-tokens // 16), 16 * stride), 0xFF, np.uint8)
    for row, values in enumerate(prepared):
        steps = values[: stride // 64 * 64].reshape(-1, 64)
        places = np.arange(len(steps))[:, None] * 1024 + row % 16 * 64 + np.arange(64)
        strips[row // 16][places] = steps
    return strips


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def in_tiles(tiles, name, packed, rows, cols, prepared, tile_range=None, prompt=False, strips=False, up=None):
    """Y (tokens, rows), and how many rows of tiles products were added to."""
    library, model = tiles
    begin, end = tile_range or (0, (rows + 15) // 16)
    y = np.full((len(prepared), rows), 7, np.float32)
    before = operations(model)
    if prompt:
        rows, cols, begin, end, stride, tokens = (
            ctypes.c_int64(n) for n in (rows, cols, begin, end, prepared.shape[1], len(prepared))
        )
        x = in_strips(prepared) if strips else prepared
        where = pointer(packed), begin, end, pointer(x), stride, int(strips), tokens, pointer(y)
        model.tile_multiply_prompt(number(name), rows, cols, *where, None if up is None else pointer(up))
    else:
        multiply("amx", name, packed, rows, cols, prepared, (begin, end), y, library)
    assert not model.tiles_are_live()
    return y, (operations(model) - before)[3]


def as_bfloat16(values):
    """Float32 rounded to bfloat16, nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def assert_same_bits(ours, theirs):
    """Of numbers; which NaN comes of two is the compiler's choice."""
    ours, theirs = (np.where(np.isnan(y), np.float32(np.nan), y) for y in (ours, theirs))
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@cases("name", [*HALF_FIELDS, "INT4_32", "INT4_32Z", "INT4_128Z", "NVFP4"])
def test_bytes_in_tiles_have_the_bits_of_avx512(tiles, name):
    for rows, cols in ((37, odd_columns(name)), (32, 512), (16, 256), (5, 256), (70, block_of(name)[0])):
        data, _ = random_rows(name, rows, cols, seed=rows)
        packed = pack("avx512_bf16", name, data, rows, cols)
        prepared = prepare(
            "avx512_bf16", 2, np.random.default_rng(rows).normal(size=(max(TOKENS), cols)).astype(np.float32)
        )
        whole = multiply("avx512_bf16", name, packed, rows, cols, prepared)
        for tokens in TOKENS:
            y, worked = in_tiles(tiles, name, packed, rows, cols, prepared[:tokens])
            assert_same_bits(y, whole[:tokens])
            assert tokens >= 10 if worked else tokens <= 17  # fewer tokens take vectors
            assert worked % tokens == 0  # tiles have as many rows as there are tokens, and read no others


@cases("name", [*HALF_FIELDS, "INT4_32", "INT4_32Z", "INT4_128Z", "NVFP4"])
def test_prompts_are_products_of_weights_in_bfloat16(tiles, name):
    wide = -(-4352 // block_of(name)[0]) * block_of(name)[0]  # more columns than are expanded at a time
    for rows, cols in ((37, odd_columns(name)), (300, 512), (5, 256), (18, wide)):
        data, values = random_rows(name, rows, cols, seed=rows)
        packed = pack("avx512_bf16", name, data, rows, cols)
        x = np.random.default_rng(rows).normal(size=(70, cols)).astype(np.float32)
        prepared = prepare("avx512_bf16", 1, x)
        run = functools.partial(in_tiles, tiles, name, packed, rows, cols, prompt=True)
        y, worked = run(prepared)
        assert worked
        near = lambda a: as_bfloat16(a).astype(np.float64)
        exact = near(x) @ near(values).T
        sizes = np.abs(near(x)) @ np.abs(near(values)).T
        assert (np.abs(y - exact) <= 2e-5 * sizes + 1e-30).all()
        for tokens in (1, 17, 33, 65):  # bits of any number of tokens, and of any division of rows
            assert_same_bits(run(prepared[-tokens:])[0], y[-tokens:])
        for strips in (False, True):
            part, _ = run(prepared, tile_range=(1, (rows + 15) // 16), strips=strips)
            assert (part[:, :16] == 7).all()
            assert_same_bits(part[:, 16:], y[:, 16:])


def test_prompts_in_strips_have_the_bits_of_rows(tiles):
    for name, rows, cols, tokens in (("BF16", 40, 1072, 530), ("BF16", 530, 256, 90), ("Q4_K", 300, 1280, 600)):
        data, _ = random_rows(name, rows, cols, seed=cols)
        packed = pack("avx512_bf16", name, data, rows, cols)
        x = np.random.default_rng(rows).normal(size=(tokens, cols)).astype(np.float32)
        prepared = prepare("avx512_bf16", 1, x)
        run = functools.partial(in_tiles, tiles, name, packed, rows, cols)
        y, _ = run(prepared, prompt=name != "BF16")
        for count in (tokens, 64, 33, 7):
            assert_same_bits(run(prepared[:count], prompt=True, strips=True)[0], y[:count])


@pytest.mark.parametrize(
    "name, rows, cols, tokens", [("BF16", 300, 1072, 90), ("BF16", 37, 256, 7), ("Q4_K", 150, 768, 70)]
)
def test_gates_that_are_joined_early_have_the_bits_of_two_products(tiles, name, rows, cols, tokens):
    gate, up = (pack("avx512_bf16", name, random_rows(name, rows, cols, seed=s)[0], rows, cols) for s in (1, 2))
    x = np.random.default_rng(rows).normal(size=(tokens, cols)).astype(np.float32)
    prepared = prepare("avx512_bf16", 1, x)
    run = functools.partial(in_tiles, tiles, name, rows=rows, cols=cols, prepared=prepared, prompt=True, strips=True)
    products = [run(packed=packed)[0] for packed in (gate, up)]
    expected = np.empty_like(products[0])
    native.check(
        native.lib.ckdist_gated(b"avx512_bf16", GATES["silu"], *map(floats, products), expected.size, floats(expected))
    )
    assert_same_bits(run(packed=gate, up=up)[0], expected)
    part, _ = run(packed=gate, up=up, tile_range=(1, 2))
    assert_same_bits(part[:, 16:32], expected[:, 16:32])
    assert (part[:, :16] == 7).all() and (part[:, 32:] == 7).all()


@cases("name", HALF_FIELDS)
def test_the_largest_codes_and_what_is_not_finite(tiles, name):
    elements, size = block_of(name)
    cols = 256 // elements * elements
    x = np.stack(
        [
            np.full(cols, 127),
            np.full(cols, -127),
            np.tile([127, -127], cols // 2),
            np.full(cols, 1e-36),
            np.full(cols, 3),
        ]
    ).astype(np.float32)
    x[4, 77] = np.nan
    prepared = np.tile(prepare("avx512_bf16", 2, x), (5, 1))
    for fill in (0x00, 0x7F, 0x80, 0xFF):
        blocks = np.full((16, cols // elements, size), fill, np.uint8)
        for at in HALF_FIELDS[name]:
            blocks[..., at : at + 2] = np.float16(1).reshape(1).view(np.uint8)
        packed = pack("avx512_bf16", name, blocks.reshape(16, -1), 16, cols)
        y, _ = in_tiles(tiles, name, packed, 16, cols, prepared)
        assert_same_bits(y, multiply("avx512_bf16", name, packed, 16, cols, prepared))
        assert np.isnan(y[4::5]).all()


@pytest.mark.parametrize("rows, cols", [(37, 77), (16, 32), (5, 16), (50, 200), (40, 6416)])
def test_bfloat16_in_tiles(tiles, rows, cols):
    data, values = random_rows("BF16", rows, cols, seed=rows)
    packed = pack("avx512_bf16", "BF16", data, rows, cols)
    x = np.random.default_rng(rows).integers(-127, 128, (max(TOKENS), cols)).astype(np.float32)  # exact in bfloat16
    prepared = prepare("avx512_bf16", 1, x)
    exact, magnitude = (
        x.astype(np.float64) @ values.T.astype(np.float64),
        np.abs(x).astype(np.float64) @ np.abs(values).T.astype(np.float64),
    )
    whole, _ = in_tiles(tiles, "BF16", packed, rows, cols, prepared)
    assert np.all(np.abs(whole - exact) <= 2e-6 * magnitude)
    for tokens in TOKENS:
        y, worked = in_tiles(tiles, "BF16", packed, rows, cols, prepared[:tokens])
        assert worked > 0 and worked % tokens == 0
        assert_same_bits(y, whole[:tokens])
    prepared.view(np.uint16)[:, (cols + 15) // 16 * 16 :] = 0x7FC0  # NaN: no product reads them
    assert_same_bits(in_tiles(tiles, "BF16", packed, rows, cols, prepared)[0], whole)


@pytest.mark.parametrize("name", ["BF16", "F8_E4M3", "F8_E4M3_32", "Q4_K", "Q6_K"])
def test_the_model_has_the_bits_of_the_hardware(tiles, name):
    if lacks := native.isas().get("amx", "a compiler that knows it"):
        pytest.skip(f"level amx: this CPU lacks {lacks}")
    rows, cols = 50, 1024
    packed = pack("amx", name, random_rows(name, rows, cols)[0], rows, cols)
    x = np.random.default_rng(2).normal(size=(40, cols)).astype(np.float32)
    prepared = prepare("amx", activation_format("amx", name), x)
    y, _ = in_tiles(tiles, name, packed, rows, cols, prepared)
    assert_same_bits(y, multiply("amx", name, packed, rows, cols, prepared))


@pytest.mark.parametrize("rows, cols", [(37, 96), (16, 32), (50, 224), (40, 4352)])
def test_floats_of_8_bits_in_tiles(tiles, rows, cols):
    data, values = random_rows("F8_E4M3", rows, cols, seed=rows)
    packed = pack("avx512_bf16", "F8_E4M3", data, rows, cols)
    x = np.random.default_rng(rows).integers(-127, 128, (max(TOKENS), cols)).astype(np.float32)  # exact in bfloat16
    prepared = prepare("avx512_bf16", 1, x)
    exact = x.astype(np.float64) @ values.T.astype(np.float64)
    magnitude = np.abs(x).astype(np.float64) @ np.abs(values).T.astype(np.float64)
    whole, _ = in_tiles(tiles, "F8_E4M3", packed, rows, cols, prepared)
    assert np.all(np.abs(whole - exact) <= 2e-6 * magnitude)
    for tokens in TOKENS:
        y, worked = in_tiles(tiles, "F8_E4M3", packed, rows, cols, prepared[:tokens])
        assert worked > 0 and worked % tokens == 0
        assert_same_bits(y, whole[:tokens])


def test_bfloat16_is_added_in_the_order_of_the_instruction(tiles):
    """Two chains over 16 pairs, then their sum: in float32 every step, with numbers that show where each is rounded."""
    rng = np.random.default_rng(8)
    x = rng.choice(np.float32([1, 1 + 2.0**-7, 2.0**12, -(2.0**12), 3e-5]), (4, 96))
    w = rng.choice(np.float32([1, 1 + 2.0**-7, -1, 2.0**-9, 1e-40]), (16, 96))
    bits = (w.view(np.uint32) >> 16).astype(np.uint16)
    w, x = (bits.astype(np.uint32) << 16).view(np.float32), (x.view(np.uint32) >> 16 << 16).view(np.float32)
    w[np.abs(w) < np.finfo(np.float32).tiny] = 0  # denormals count as zero
    packed = pack("avx512_bf16", "BF16", bits.view(np.uint8).reshape(16, -1), 16, 96)
    y, _ = in_tiles(tiles, "BF16", packed, 16, 96, prepare("avx512_bf16", 1, x))
    sums = np.zeros((4, 16), np.float32)
    for start in range(0, 96, 32):
        chains = np.zeros((2, 4, 16), np.float32)
        for column in range(start, start + 32):
            # exact, and so is its sum with a float32 here
            product = x[:, column, None].astype(np.float64) * w[None, :, column]
            chains[column % 2] = (chains[column % 2] + product).astype(np.float32)
        sums = sums + (chains[0] + chains[1])
    assert_same_bits(y, sums)


def test_only_the_rows_of_the_given_tiles_are_written(tiles):
    for name, fmt in (("Q4_K", 2), ("BF16", 1)):
        data, _ = random_rows(name, 70, 256)
        packed = pack("avx512_bf16", name, data, 70, 256)
        prepared = prepare("avx512_bf16", fmt, np.random.default_rng(9).normal(size=(20, 256)).astype(np.float32))
        whole, _ = in_tiles(tiles, name, packed, 70, 256, prepared)
        y, _ = in_tiles(tiles, name, packed, 70, 256, prepared, (1, 4))
        assert_same_bits(y[:, 16:64].copy(), whole[:, 16:64].copy())
        assert (y[:, :16] == 7).all() and (y[:, 64:] == 7).all()


@pytest.mark.parametrize("name", ["Q8_0", "BF16"])
def test_empty_matrices(tiles, name):
    for rows, cols, tokens in ((0, 256, 25), (5, 0, 25), (5, 0, 40)):
        data, _ = random_rows(name, rows, cols)
        prepared = prepare("avx512_bf16", activation_format("avx512_bf16", name), np.ones((tokens, cols), np.float32))
        y, _ = in_tiles(tiles, name, pack("avx512_bf16", name, data, rows, cols), rows, cols, prepared)
        assert cols or not y.any()


def test_the_peak_counts_what_tiles_do(tiles):
    """One product of whole tiles: 16 x 16 sums of 64 bytes or 32 bfloat16, two operations each."""
    model = tiles[1]
    for fmt, depth in ((2, 64), (1, 32)):
        before = operations(model)
        peak = model.tile_peak(fmt, ctypes.c_int64(3))
        rows = (operations(model) - before)[3]
        assert rows == 3 * 4 * 16 and peak == rows * 16 * depth * 2
    assert not model.tiles_are_live()


@pytest.mark.parametrize(
    "name, prompt, most_stores", [("Q4_K", True, 0.01), ("Q6_K", True, 0.01), ("BF16", False, 0.04)]
)
def test_a_product_needs_one_load_and_few_stores(tiles, name, prompt, most_stores):
    """Two by two tiles of sums take four loads for four products; sums stay in tiles over many columns."""
    cols, tokens = 4096, 64
    packed = pack("avx512_bf16", name, random_rows(name, 32, cols)[0], 32, cols)
    prepared = prepare("avx512_bf16", 1, np.ones((tokens, cols), np.float32))
    before = operations(tiles[1])
    in_tiles(tiles, name, packed, 32, cols, prepared, prompt=prompt)
    loads, stores, products, _ = operations(tiles[1]) - before
    assert products == 2 * (tokens // 16) * (cols // 32)
    assert loads / products <= 1.04 and stores / products <= most_stores


def bfloat16_rows(rng, rows, cols):
    """(rows, cols + 32) of bits, the last columns zero, and the values."""
    values = as_bfloat16(rng.normal(size=(rows, cols + 32))).view(np.float32)
    values[:, cols:] = 0
    return (values.view(np.uint32) >> 16).astype(np.uint16), values[:, :cols]


# Blocks of 512 columns, segments of 2,048, odd tiles, half steps, several groups of tiles and of strips.
SHAPES = [(5, 3, 16), (33, 40, 48), (70, 300, 560), (40, 35, 2048), (20, 50, 4640), (530, 17, 80)]


@pytest.mark.parametrize("tokens, rows, cols", SHAPES)
def test_strips_have_the_bits_of_rows(tiles, tokens, rows, cols):
    rng = np.random.default_rng(cols)
    w, weights = bfloat16_rows(rng, rows, cols)
    x, values = bfloat16_rows(rng, tokens, cols)
    packed = pack("avx512_bf16", "BF16", np.ascontiguousarray(w[:, :cols]).view(np.uint8), rows, cols)
    bias, residual = rng.normal(size=rows + 16).astype(np.float32), rng.normal(size=(tokens, rows)).astype(np.float32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (packed, x, bias, residual)]
    sizes = [ctypes.c_int64(n) for n in (rows, cols, x.strides[0], tokens)]
    y = np.empty((tokens, rows), np.float32)
    tiles[1].tile_multiply_rows(*sizes[:2], *pointers[:2], *sizes[2:], ctypes.c_void_p(y.ctypes.data))
    exact = values.astype(np.float64) @ weights.T.astype(np.float64)
    assert np.abs(y - exact).max() <= 1e-5 * np.sqrt(cols)
    y = y + bias[:rows] + residual
    for narrow in (0, 1):
        out = np.zeros((tokens, (rows + 15) // 16 * 16), np.uint16 if narrow else np.float32)
        to = ctypes.c_void_p(out.ctypes.data)
        tiles[1].tile_produce(*sizes[:2], *pointers[:2], *sizes[2:], *pointers[2:], narrow, to)
        if narrow:
            assert np.array_equal(out[:, :rows], as_bfloat16(y).view(np.uint32) >> 16)
        else:
            assert_same_bits(out[:, :rows], y)
    assert not tiles[1].tiles_are_live()


@pytest.mark.parametrize("tokens, rows, columns", [(7, 5, 16), (40, 70, 48), (530, 33, 300), (1100, 64, 64)])
def test_gradients_in_strips_have_the_bits_of_tiles(tiles, tokens, rows, columns):
    rng = np.random.default_rng(tokens)
    dy, slopes = bfloat16_rows(rng, tokens, rows)
    x, values = bfloat16_rows(rng, tokens, columns)
    exact = slopes.T.astype(np.float64) @ values.astype(np.float64)
    for add in (0, 1):
        outputs = []
        for strips in (0, 1):
            memory = np.ones(rows * columns + 16, np.float32)
            y = memory[-memory.ctypes.data // 4 % 16 :][: rows * columns]  # lines that can be written past the caches
            sizes = [ctypes.c_int64(n) for n in (tokens, rows, columns)]
            tiles[1].tile_outer(strips, *sizes, *(ctypes.c_void_p(a.ctypes.data) for a in (dy, x, y)), add)
            outputs.append(y.reshape(rows, columns))
        assert_same_bits(*outputs)
        assert np.abs(outputs[0] - add - exact).max() <= 1e-5 * np.sqrt(tokens)


# Of keys, values, and whether these are a part of keys.
WIDTHS = [(128, 128, False), (72, 40, False), (8, 24, False), (96, 64, True), (40, 24, True)]


@pytest.mark.parametrize("key_width, value_width, latent", WIDTHS)
def test_attention_in_tiles_has_the_bits_of_avx512(tiles, key_width, value_width, latent):
    library, model = tiles
    rng = np.random.default_rng(5)
    for tokens, heads, positions in ((9, 1, 9), (20, 3, 500), (1, 17, 300), (150, 1, 150)):
        k, v = (rng.normal(size=(positions, width)).astype(np.float32) for width in (key_width, value_width))
        q = 2 * rng.normal(size=(tokens, heads, key_width)).astype(np.float32)
        cache = Cache(b"avx512_bf16", "i16", k, k[:, :value_width].copy() if latent else v, latent=latent)
        here = copy.copy(cache)
        here.isa = b"amx"
        for settings in (Settings(), Settings(window=40, soft_cap=5, sinks=tuple(range(heads)))):
            whole = attend(cache, q, positions - tokens, settings)
            for spans in (0, 1):
                before = operations(model)
                assert_same_bits(attend(here, q, positions - tokens, settings, spans, library), whole)
                assert operations(model)[3] > before[3] and not model.tiles_are_live()


# Training in bfloat16, experts over ranks, prompts of quantised weights and of experts.
IN_TILES = [
    "tests/kernels/test_native_training.py::test_odd_shapes",
    "tests/kernels/test_native_training.py::test_threads_and_repetition_change_no_bit",
    "tests/models/test_prompt_roles.py::test_quantised_prompts_have_the_same_bits_in_any_chunks",
    "tests/models/test_gptoss_files.py::test_blocks_on_several_ranks",
]


def test_models_and_training_in_tiles(tiles):
    """A part of `make test-tiles`."""
    environment = {**os.environ, "CKDIST_ISA": "amx", "CKDIST_LIBRARY": str(LIBRARY)}
    environment = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *IN_TILES]
    command += ["-k", "lengths2 or change_no_bit and bfloat16 or same_bits or ab-tensor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.skipif(
    not {"avx2", "avx512"} <= native.isas().keys(), reason="a build of this CPU's levels: no LEVELS=all"
)
def test_the_library_has_the_instructions():
    code = Path(os.environ.get("CKDIST_LIBRARY") or NATIVE / "libckdist.so").read_bytes()
    # VEX.128, map 0F38, W0, opcode 5E (tdpbssd, F2) and 5C (tdpbf16ps, F3): tmm0 += tmm4 * tmm6.
    assert bytes.fromhex("c4e24b5ec4") in code and bytes.fromhex("c4e24a5cc4") in code


def run(isa):
    environment = {**os.environ, "CKDIST_ISA": isa}
    return subprocess.run(
        [sys.executable, "-m", "ckdist.cli.main", "perplexity", "--token-ids", "1,2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )


def test_a_level_that_is_not_there_is_refused_in_one_line():
    """By the commands and by single calls: never another level in its place."""
    lacking = [
        (name, f"ISA {name} needs {lacks}, which this CPU lacks; use one of")
        for name, lacks in native.isas().items()
        if lacks
    ]
    for isa, message in [*lacking[:1], ("none such", "ISA none such is not known to this build; use one of")]:
        with pytest.raises(ConfigError, match=message):
            native.check(native.lib.ckdist_tile_bytes(isa.encode(), 0, 256))
        done = run(isa)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1

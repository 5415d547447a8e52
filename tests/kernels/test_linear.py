"""Packed products of every weight type on every ISA of this machine, against the gguf package's dequantisation.

Activations that are whole numbers with a largest magnitude of 127 in every group of 32 have int8 codes equal to
themselves and scale 1, and are exact in bfloat16 too: with them a product may differ from the reference by float32
rounding alone.
"""

from itertools import product

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from ckdist import errors
from ckdist.native import check, ffi, lib, pointer
from tests.support.cases import cases
from tests.support.levels import HERE, each
from tests.support.pairs import paired
from tests.support.products import (
    HALF_FIELDS,
    TYPES,
    activation_format,
    block_of,
    multiply,
    number,
    odd_columns,
    pack,
    prepare,
    random_rows,
    scale_elsewhere,
    whole_activations,
)

F32, BF16, Q8 = 0, 1, 2


@cases("name", TYPES)
def test_dequantize_equals_gguf(name):
    data, values = random_rows(name, 5, odd_columns(name))
    out = np.empty_like(values)
    check(
        lib.ckdist_dequantize(
            number(name), *values.shape, pointer(data, "uint8_t *"), data.size, pointer(out, "float *")
        )
    )
    np.testing.assert_array_equal(out, values)


@cases("name", TYPES)
def test_unpacking_gives_the_files_values(name):
    rows, cols = 37, odd_columns(name)
    data, values = random_rows(name, rows, cols)
    tiles = pack("baseline", name, data, rows, cols)
    out = np.empty_like(values)
    check(
        lib.ckdist_unpack(
            ffi.NULL, number(name), rows, cols, pointer(tiles, "uint8_t *"), tiles.size, pointer(out, "float *")
        )
    )
    np.testing.assert_array_equal(out, values)
    for isa in HERE:
        np.testing.assert_array_equal(pack(isa, name, data, rows, cols), tiles)


@cases("name", TYPES)
def test_packing_costs_a_few_per_cent(name):
    elements, size = block_of(name)
    packed = check(lib.ckdist_tile_bytes(ffi.NULL, number(name), 4096))
    assert packed <= 1.06 * 16 * 4096 // elements * size


@cases("name", HALF_FIELDS)
def test_blocks_of_any_bytes_mean_what_gguf_says(name):
    """Infinite scales and such too: what is no number there is none here, and the products of other rows stay as
    they are.
    """
    elements, size = block_of(name)
    rows, cols = 32, 2 * elements
    data = np.random.default_rng(8).integers(0, 256, (rows, 2 * size), np.uint8)
    for at in HALF_FIELDS[name]:
        data[0, at : at + 2] = np.float16("inf").reshape(1).view(np.uint8)
        data[1, at : at + 2] = np.float16("nan").reshape(1).view(np.uint8)
    x = whole_activations(1, cols)
    with np.errstate(all="ignore"):
        values = quants.dequantize(data, GGMLQuantizationType[name])
        exact = values.astype(np.float64) @ x[0]
        magnitude = np.abs(values).astype(np.float64) @ np.abs(x[0])
    out = np.empty_like(values)
    check(
        lib.ckdist_dequantize(number(name), rows, cols, pointer(data, "uint8_t *"), data.size, pointer(out, "float *"))
    )
    np.testing.assert_array_equal(out, values)
    whole = np.isfinite(values).all(1)
    for isa in HERE:
        y = multiply(isa, name, pack(isa, name, data, rows, cols), rows, cols, prepare(isa, Q8, x))[0]
        assert np.all(np.abs(y - exact)[whole] <= 2e-6 * magnitude[whole]) and not np.isfinite(y[~whole]).any()


@cases(*paired({"isa": each(), "name": TYPES, "rows, tokens": [(16, 1), (37, 3), (50, 35)]}))
def test_whole_activations_give_the_exact_product(isa, name, rows, tokens):
    cols = odd_columns(name)
    data, values = random_rows(name, rows, cols, seed=rows)
    x = whole_activations(tokens, cols)
    y = multiply(
        isa, name, pack(isa, name, data, rows, cols), rows, cols, prepare(isa, activation_format(isa, name), x)
    )
    exact = x.astype(np.float64) @ values.T.astype(np.float64)
    magnitude = np.abs(x).astype(np.float64) @ np.abs(values).T.astype(np.float64)
    assert np.all(np.abs(y - exact) <= 2e-6 * magnitude)


@cases("isa, name", product(each(), HALF_FIELDS))
def test_the_largest_codes_do_not_saturate(isa, name):
    elements, size = block_of(name)
    cols = 2 * elements
    for fill in (0x00, 0x77, 0x7F, 0x80, 0xFF):
        blocks = np.full((16, 2, size), fill, np.uint8)
        for at in HALF_FIELDS[name]:
            blocks[..., at : at + 2] = np.float16(1).reshape(1).view(np.uint8)
        scale_elsewhere(name, blocks, np.ones((16, 2), np.float16))
        data = blocks.reshape(16, 2 * size)
        values = quants.dequantize(data, GGMLQuantizationType[name]).astype(np.float64)
        x = np.stack([np.full(cols, 127), np.full(cols, -127), np.tile([127, -127], cols // 2)]).astype(np.float32)
        y = multiply(isa, name, pack(isa, name, data, 16, cols), 16, cols, prepare(isa, Q8, x))
        assert np.all(np.abs(y - x @ values.T) <= 2e-6 * 127 * np.abs(values).sum(1))


@cases("isa, name", product(each(), HALF_FIELDS))
def test_extreme_codes_in_every_order_do_not_saturate(isa, name):
    """Neighbours of every sign and size: products of two and four columns take each combination of the extremes."""
    elements, size = block_of(name)
    rng = np.random.default_rng(11)
    blocks = rng.choice(np.array([0x00, 0x0F, 0x7F, 0x80, 0x81, 0xF0, 0xFF], np.uint8), (48, 4, size))
    for at in HALF_FIELDS[name]:
        blocks[..., at : at + 2] = np.float16(1).reshape(1).view(np.uint8)
    scale_elsewhere(name, blocks, np.ones(blocks.shape[:2], np.float16))
    data = blocks.reshape(48, 4 * size)
    values = quants.dequantize(data, GGMLQuantizationType[name]).astype(np.float64)
    x = rng.choice(np.float32([-127, 127, 0, 1]), (24, 4 * elements), p=[0.45, 0.45, 0.05, 0.05])
    x[:, ::32] = 127
    y = multiply(isa, name, pack(isa, name, data, 48, 4 * elements), 48, 4 * elements, prepare(isa, Q8, x))
    assert np.all(np.abs(y - x @ values.T) <= 2e-6 * 127 * np.abs(values).sum(1))


@cases("name", TYPES)
def test_levels_give_the_same_bits(name):
    """Sums of whole numbers are exact and floats are added in one order, so instructions do not show.

    Of bfloat16 the dot product rounds its own way: activations to 8 bits, 2^-9 of each, and two products in one step,
    denormals being zero.
    """
    rows, cols = 53, 3 * max(256, block_of(name)[0])
    data, values = random_rows(name, rows, cols)
    x = np.random.default_rng(12).normal(size=(21, cols)).astype(np.float32)
    results = {
        isa: multiply(
            isa, name, pack(isa, name, data, rows, cols), rows, cols, prepare(isa, activation_format(isa, name), x)
        )
        for isa in HERE
    }
    plain = results.pop("baseline")  # multiplies and adds in two roundings
    magnitude = np.abs(x).astype(np.float64) @ np.abs(values).T.astype(np.float64)
    rounded = {isa: y for isa, y in results.items() if activation_format(isa, name) == BF16}
    same = [y for isa, y in results.items() if isa not in rounded]
    for y in same:
        np.testing.assert_array_equal(y.view(np.uint32), same[0].view(np.uint32))
        assert np.all(np.abs(y - plain) <= (2e-6 if activation_format("baseline", name) == F32 else 1e-5) * magnitude)
    for y in rounded.values():
        assert np.all(np.abs(y - plain) <= (2.0**-9 * 1.001 + 2e-6) * magnitude)


@cases("isa, name", product(each(), TYPES))
def test_rounded_activations_stay_within_their_step(isa, name):
    rows, cols, tokens = 32, 768, 2
    data, values = random_rows(name, rows, cols)
    x = np.random.default_rng(2).normal(size=(tokens, cols)).astype(np.float32)
    fmt = activation_format(isa, name)
    y = multiply(isa, name, pack(isa, name, data, rows, cols), rows, cols, prepare(isa, fmt, x))
    largest = np.abs(x).reshape(tokens, -1, 32).max(-1, keepdims=True).repeat(32, -1).reshape(tokens, cols)
    step = {F32: np.zeros_like(x), BF16: np.abs(x) * 2.0**-9, Q8: largest / 254}[fmt]
    bound = (step * 1.001 + 2e-6 * np.abs(x)).astype(np.float64) @ np.abs(values).T.astype(np.float64)
    assert np.all(np.abs(y - x.astype(np.float64) @ values.T.astype(np.float64)) <= bound)


@cases("isa, name", product(each(), TYPES))
def test_a_token_does_not_depend_on_its_batch(isa, name):
    rows, cols = 40, 1280
    data, _ = random_rows(name, rows, cols)
    tiles = pack(isa, name, data, rows, cols)
    x = np.random.default_rng(3).normal(size=(150, cols)).astype(np.float32)
    prepared = prepare(isa, activation_format(isa, name), x)
    alone = np.concatenate([multiply(isa, name, tiles, rows, cols, prepared[t : t + 1]) for t in range(len(x))])
    for tokens in (2, 3, 5, 17, 64, 150):
        together = multiply(isa, name, tiles, rows, cols, prepared[:tokens])
        np.testing.assert_array_equal(together.view(np.uint32), alone[:tokens].view(np.uint32))


@cases("isa", each())
def test_many_tokens_and_rows_give_what_few_tokens_give(isa):
    rows, cols = 270, 544  # more of both than a kernel takes at once
    data, _ = random_rows("BF16", rows, cols)
    tiles = pack(isa, "BF16", data, rows, cols)
    x = np.random.default_rng(4).normal(size=(560, cols)).astype(np.float32)
    prepared = prepare(isa, activation_format(isa, "BF16"), x)
    few = np.concatenate([multiply(isa, "BF16", tiles, rows, cols, prepared[t : t + 20]) for t in range(0, 560, 20)])
    for tokens in (65, 97, 513, 560):
        together = multiply(isa, "BF16", tiles, rows, cols, prepared[:tokens])
        np.testing.assert_array_equal(together.view(np.uint32), few[:tokens].view(np.uint32))


@cases("isa", each())
def test_rows_too_wide_to_be_expanded_once(isa):
    """Expanded, the tile is larger than what stays in the cache; each strip of tokens expands it for itself, with
    the same bits.
    """
    rows, cols = 16, 96 * 256
    data, values = random_rows("IQ2_XS", rows, cols)
    x = whole_activations(21, cols)
    tiles, prepared = pack(isa, "IQ2_XS", data, rows, cols), prepare(isa, Q8, x)
    y = multiply(isa, "IQ2_XS", tiles, rows, cols, prepared)
    np.testing.assert_array_equal(y[20:], multiply(isa, "IQ2_XS", tiles, rows, cols, prepared[20:]))
    assert np.all(np.abs(y - x @ values.T) <= 1e-5 * np.abs(x) @ np.abs(values).T)


@cases("isa", each())
def test_prepared_rows_agree_between_isas(isa):
    x = np.random.default_rng(4).normal(size=(3, 300)).astype(np.float32)
    x[1, 32:64] = 0
    for fmt in (F32, BF16, Q8):
        for lead, cols in ((0, 300), (32, 512), (45, 345)):
            np.testing.assert_array_equal(prepare(isa, fmt, x, lead, cols), prepare("baseline", fmt, x, lead, cols))
    row = prepare(isa, Q8, x[:1], 45, 345)[0]  # 345 columns are padded to 512
    codes, scales, sums32, sums16 = (
        row[:512].view(np.int8),
        row[512:576].view(np.float32),
        row[576:640].view(np.int32),
        row[640:768].view(np.int32),
    )
    np.testing.assert_allclose(
        (codes.reshape(16, 32) * scales[:, None]).reshape(-1)[45:345], x[0], atol=np.abs(x).max() / 250
    )
    assert not codes[:45].any() and not codes[345:].any()
    np.testing.assert_array_equal(sums32, -128 * codes.reshape(16, 32).astype(int).sum(-1))
    np.testing.assert_array_equal(sums16, -32 * codes.reshape(32, 16).astype(int).sum(-1))
    # scale * (256 * high + low) is scale * sum of a group of 32, to a part in 2^15 of the largest
    for block in range(2):
        high, low = row[768 + 20 * block :][:16].view(np.int8).reshape(2, 8).astype(float)
        scale = row[784 + 20 * block :][:4].view(np.float32)[0]
        exact = (scales * sums32 / 128)[8 * block :][:8]
        assert scale == 0 or np.log2(scale) % 1 == 0
        assert np.abs(scale * (256 * high + low) - exact).max() <= np.abs(exact).max() * 2.0**-15


@cases("isa, name", product(each(), ["Q8_0", "Q4_K", "BF16", "F32"]))
def test_what_is_not_finite_shows_in_the_result(isa, name):
    data, _ = random_rows(name, 16, 256)
    tiles = pack(isa, name, data, 16, 256)
    x = np.ones((2, 256), np.float32)
    x[1, 200] = np.nan
    y = multiply(isa, name, tiles, 16, 256, prepare(isa, activation_format(isa, name), x))
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


@cases("isa", each())
def test_only_the_rows_of_the_given_tiles_are_written(isa):
    data, _ = random_rows("Q4_K", 40, 256)
    tiles = pack(isa, "Q4_K", data, 40, 256)
    prepared = prepare(isa, Q8, whole_activations(2, 256))
    whole = multiply(isa, "Q4_K", tiles, 40, 256, prepared)
    y = multiply(isa, "Q4_K", tiles, 40, 256, prepared, (1, 2), np.full((2, 40), 7, np.float32))
    np.testing.assert_array_equal(y[:, 16:32], whole[:, 16:32])
    assert (y[:, :16] == 7).all() and (y[:, 32:] == 7).all()


@cases("isa, name", product(each(), ["Q8_0", "Q6_K", "BF16"]))
def test_empty_matrices(isa, name):
    for rows, cols, tokens in ((0, 256, 2), (5, 0, 2), (5, 0, 40), (5, 256, 0)):
        data, _ = random_rows(name, rows, cols)
        x = np.ones((tokens, cols), np.float32)
        y = multiply(
            isa, name, pack(isa, name, data, rows, cols), rows, cols, prepare(isa, activation_format(isa, name), x)
        )
        assert y.shape == (tokens, rows) and (cols or not y.any())


def quantized(name, x):
    """`x` through the quantiser and the gguf package's dequantisation."""
    elements, size = block_of(name)
    out = np.empty((x.shape[0], x.shape[1] // elements * size), np.uint8)
    check(
        lib.ckdist_quantize(
            ffi.NULL, number(name), *x.shape, pointer(x, "float *"), pointer(out, "uint8_t *"), out.size
        )
    )
    return quants.dequantize(out, GGMLQuantizationType[name]).reshape(x.shape)


def relative_error(y, x):
    return np.sqrt(np.mean((y - x) ** 2) / np.mean(x**2))


def test_quantisers_err_as_little_as_the_formats_allow():
    x = np.random.default_rng(5).normal(size=(64, 1024)).astype(np.float32)
    reference = quants.dequantize(quants.quantize(x, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert relative_error(quantized("Q8_0", x), x) <= relative_error(reference, x)
    # 32 Gaussian values in 16 even steps over their range err by 0.080; searching for better steps gives 0.070.
    assert relative_error(quantized("Q4_K", x), x) < 0.072
    for name in ("F16", "BF16"):
        same = quants.dequantize(quants.quantize(x, GGMLQuantizationType[name]), GGMLQuantizationType[name])
        np.testing.assert_array_equal(quantized(name, x), same)


@cases("scale, shift", product([1e-30, 1e-6, 1.0, 3e4], [0.0, 3.0, -3.0]))
def test_quantisers_at_the_edges_of_range(scale, shift):
    x = ((np.random.default_rng(6).normal(size=(4, 256)) + shift) * scale / 8).astype(np.float32)
    x[1] = 0
    x[2, 100:] = x[2, 100]
    tiny = 2.0**-24 * 127  # what float16 scales cannot tell from zero
    for name, bound in (("Q8_0", 0.02), ("Q4_K", 0.2)):
        y = quantized(name, x)
        assert np.abs(y - x).max() <= bound * np.abs(x).max() + tiny
        assert not y[1].any()


def test_refusals_name_the_numbers():
    x = np.full((1, 256), np.inf, np.float32)
    with pytest.raises(errors.ModelFileError, match=r"row 0 .* Q4_K"):
        quantized("Q4_K", x)
    with pytest.raises(errors.NativeError, match=r"cols \(100\) must be a multiple of Q4_K's block of 256"):
        check(lib.ckdist_tile_bytes(ffi.NULL, number("Q4_K"), 100))
    with pytest.raises(errors.NativeError, match="type 4 is not known"):
        check(lib.ckdist_tile_bytes(ffi.NULL, 4, 256))
    with pytest.raises(errors.ConfigError, match="ISA mmx"):
        check(lib.ckdist_tile_bytes(b"mmx", 0, 256))
    with pytest.raises(errors.NativeError, match="tiles has 10 bytes, needs"):
        multiply("baseline", "F32", np.empty(10, np.uint8), 16, 16, np.empty((1, 1024), np.uint8))

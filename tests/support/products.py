"""Quantised rows as bytes, packed, and multiplied by one level's kernels.

Types of GGUF mean what the gguf package says, those of safetensors what is written here.
"""

import functools

import numpy as np
from gguf import GGMLQuantizationType, quants

from ckdist.native import check, lib, pointer

HALF_FIELDS = {  # where a block's float16 scales stand, in bytes
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "IQ1_S": [0],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "IQ1_M": [],
    "MXFP4": [],
}


OWN = {
    "F8_E4M3": 64,
    "INT4_32": 65,
    "INT4_32Z": 66,
    "INT4_128Z": 67,
    "NVFP4": 68,
    "F8_E4M3_32": 69,
}  # types of safetensors
TYPES = ["F32", "F16", "BF16", *HALF_FIELDS, *OWN]


def number(name):
    return OWN[name] if name in OWN else int(GGMLQuantizationType[name])


def dequantize(name, data):
    """float32 (rows, cols) of rows as bytes."""
    if name not in OWN:
        return quants.dequantize(data, GGMLQuantizationType[name])
    blocks = data.reshape(len(data), -1, block_of(name)[1])
    if name == "NVFP4":
        factors = np.ascontiguousarray(blocks[..., :4]).view("<f4").astype(np.float64)
        codes = blocks[..., 4:6].astype(int)
        numbers = np.where(codes, np.ldexp(1 + (codes & 7) / 8, (codes >> 3) - 127), 0)
        scales = (factors * numbers).astype(np.float32).repeat(16, -1)
        halves = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
        codes = np.concatenate([blocks[..., 6:] & 15, blocks[..., 6:] >> 4], -1)
        return (scales * np.where(codes & 8, -halves[codes & 7], halves[codes & 7])).reshape(len(data), -1)
    if name == "INT4_32":
        scales = np.zeros((*blocks.shape[:2], 2), np.uint16)
        scales[..., 1:] = blocks[..., :2].view("<u2")
        scales, codes = scales.view("<f4"), blocks[..., 2:]
    else:
        scales, codes = np.ascontiguousarray(blocks[..., :4]).view("<f4"), blocks[..., 4:]
    if name.startswith("F8"):
        values = e4m3(codes)
    else:
        values = np.concatenate([codes & 15, codes >> 4], -1).astype(np.float32)
        zeros = 8 if name == "INT4_32" else blocks[..., :1] & 15
        values = values - zeros
        if name != "INT4_32":
            scales = (scales.view("<u4") & ~np.uint32(15)).view("<f4")
    return (scales * values.astype(np.float32)).reshape(len(data), -1)


def e4m3(codes):
    """float64 of 8-bit floats, which are no NaN."""
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent.astype(int) - 7)
    return np.where(codes & 128, -1, 1) * np.where(exponent, normal, mantissa * 2.0**-9)


def random_own(name, rows, count, rng):
    """Blocks (rows, count, bytes) of a type of safetensors; those of 128 columns have one scale."""
    blocks = rng.integers(0, 256, (rows, count, block_of(name)[1]), np.uint8)
    each = 4 if name in ("F8_E4M3", "INT4_128Z", "NVFP4") else 1
    scales = np.repeat(rng.uniform(-0.01, 0.01, (rows, -(-count // each))).astype(np.float32), each, 1)[:, :count]
    if name == "INT4_32":
        blocks[..., :2] = (scales.view("<u4") >> 16).astype("<u2")[..., None].view(np.uint8)
        return blocks
    words = scales.view("<u4")
    if name == "NVFP4":
        words = (np.abs(scales) * np.float32(2.0**112)).view("<u4")
        blocks[..., 4:6] = np.array([0, *range(8, 151)], np.uint8)[blocks[..., 4:6] % 144]
    elif not name.startswith("F8"):
        zeros = np.repeat(rng.integers(0, 16, (rows, -(-count // each)), np.uint32), each, 1)[:, :count]
        words = words & ~np.uint32(0xFFFF) | zeros
    else:
        codes = blocks[..., 4:]
        codes[codes & 127 == 127] = 0x7E  # NaNs
    blocks[..., :4] = words[..., None].view(np.uint8)
    return blocks


def block_of(name):
    return lib.ckdist_type_block_elements(number(name)), lib.ckdist_type_block_bytes(number(name))


def scale_elsewhere(name, blocks, scales):
    """Gives blocks (rows, blocks, bytes) scales that stand in no half-precision field: IQ1_M's in four parts,
    MXFP4's power of two near it.
    """
    if name == "IQ1_M":
        parts = scales.view(np.uint16)[..., None] >> np.array([0, 4, 8, 12], np.uint16) & 15
        blocks[..., 49::2] = blocks[..., 49::2] & 15 | (parts << 4).astype(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = np.frexp(np.abs(scales).astype(np.float32))[1] + 127


@functools.lru_cache(64)
def random_rows(name, rows, cols, seed=0):
    """Rows in the file's format, every code and sub-scale drawn at random: uint8 (rows, bytes), and their float32
    values. Nobody may change them.
    """
    rng = np.random.default_rng(seed)
    elements, size = block_of(name)
    if not rows * cols:
        return np.empty((rows, 0), np.uint8), np.empty((rows, cols), np.float32)
    if name in HALF_FIELDS:
        blocks = rng.integers(0, 256, (rows, cols // elements, size), np.uint8)
        for at in HALF_FIELDS[name]:
            scales = rng.uniform(-0.01, 0.01, (rows, cols // elements, 1)).astype(np.float16)
            blocks[..., at : at + 2] = scales.view(np.uint8)
        scale_elsewhere(name, blocks, rng.uniform(-0.01, 0.01, blocks.shape[:2]).astype(np.float16))
        data = blocks.reshape(rows, cols // elements * size)
    elif name in OWN:
        data = random_own(name, rows, cols // elements, rng).reshape(rows, -1)
    else:
        data = quants.quantize(rng.normal(size=(rows, cols)).astype(np.float32), GGMLQuantizationType[name])
        data = np.ascontiguousarray(data).view(np.uint8).reshape(rows, cols * size)
    return data, dequantize(name, data).reshape(rows, cols)


def pack(isa, name, data, rows, cols):
    tile_bytes = check(lib.ckdist_tile_bytes(isa.encode(), number(name), cols))
    tiles = np.full((rows + 15) // 16 * tile_bytes, 0xFF, np.uint8)
    check(
        lib.ckdist_pack(
            isa.encode(),
            number(name),
            rows,
            cols,
            pointer(data, "uint8_t *"),
            data.size,
            pointer(tiles, "uint8_t *"),
            tiles.size,
        )
    )
    return tiles


def prepare(isa, fmt, x, lead=0, cols=None):
    cols = x.shape[1] if cols is None else cols
    out = np.full((len(x), check(lib.ckdist_activation_bytes(fmt, cols))), 0xFF, np.uint8)
    check(
        lib.ckdist_prepare(
            isa.encode(),
            fmt,
            pointer(x, "float *"),
            len(x),
            x.shape[1],
            lead,
            cols,
            pointer(out, "uint8_t *"),
            out.size,
        )
    )
    return out


def multiply(isa, name, tiles, rows, cols, prepared, tile_range=None, y=None, library=lib):
    begin, end = tile_range or (0, (rows + 15) // 16)
    y = np.full((len(prepared), rows), np.nan, np.float32) if y is None else y
    check(
        library.ckdist_multiply(
            isa.encode(),
            number(name),
            rows,
            cols,
            pointer(tiles, "uint8_t *"),
            tiles.size,
            begin,
            end,
            pointer(prepared, "uint8_t *"),
            prepared.size,
            len(prepared),
            pointer(y, "float *"),
        )
    )
    return y


def whole_activations(tokens, cols, seed=1):
    x = np.random.default_rng(seed).integers(-127, 128, (tokens, cols)).astype(np.float32)
    x[:, ::32] = 127
    return x


def activation_format(isa, name):
    return check(lib.ckdist_activation_format(isa.encode(), number(name)))


def odd_columns(name):
    elements, _ = block_of(name)
    return 77 if elements == 1 else 5 * elements

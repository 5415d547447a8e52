"""Levels whose sums are fused and in one order give the same bits on every CPU: those on record, which AVX2 made."""

import functools
import hashlib
import itertools
import json

import numpy as np

from tests.kernels import test_attention as attention
from tests.support import products as linear
from tests.support.cases import cases
from tests.support.levels import ALL, each
from tests.support.paths import GOLDEN

RECORD = GOLDEN / "level_bits.json"
FUSED = [name for name in ALL if name != "baseline"]  # which multiplies and adds in two roundings
# Whose dot product of bfloat16 rounds in a way of its own.
BY_PAIRS = ("BF16", "F8_E4M3", "F8_E4M3_32")  # types that it multiplies
BF16_DOT = ("avx512_bf16", "amx", "neon_bf16")


def numbers(shape, seed):
    """float32 that any machine draws alike: whole numbers over a power of two."""
    whole = np.random.default_rng(seed).integers(-(1 << 20), 1 << 20, shape)
    return (whole * 2.0**-19).astype(np.float32)


def digest(array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def rows_of(name, rows, cols):
    """Rows in the file's format, without a library's conversions between."""
    if name in (*linear.HALF_FIELDS, *linear.OWN):
        return linear.random_rows(name, rows, cols)[0]
    values = numbers((rows, cols), 3)
    if name == "F32":
        return values.view(np.uint8)
    halves = values.astype(np.float16) if name == "F16" else values.view(np.uint16)[:, 1::2]
    return np.ascontiguousarray(halves).view(np.uint8)


@functools.cache
def recorded(kind):
    return json.loads(RECORD.read_text())[kind]


def product(isa, name):
    rows, cols = 37, 3 * max(256, linear.block_of(name)[0])
    tiles = linear.pack(isa, name, rows_of(name, rows, cols), rows, cols)
    prepared = linear.prepare(isa, linear.activation_format(isa, name), numbers((11, cols), 4))
    return linear.multiply(isa, name, tiles, rows, cols, prepared)


def attended(isa, kv_type, heads):
    k, v, q = numbers((300, 96), 5) * 2, numbers((300, 96), 6), numbers((7, heads, 96), 7) * 2
    settings = attention.Settings(scale=0.1, soft_cap=20.0 if heads == 1 else 0.0)
    return attention.attend(attention.Cache(isa.encode(), kv_type, k, v), q, 293, settings)


@cases("isa, name", itertools.product(each(FUSED), [name for name in linear.TYPES if name not in BY_PAIRS]))
def test_products(isa, name):
    assert digest(product(isa, name)) == recorded("products")[name]


@cases("isa, name", itertools.product(each([name for name in FUSED if name not in BF16_DOT]), BY_PAIRS))
def test_products_of_expanded_bfloat16(isa, name):
    assert digest(product(isa, name)) == recorded("products")[name]


@cases("isa, kv_type, heads", itertools.product(each(FUSED), list(attention.TYPES), [1, 5]))
def test_attention(isa, kv_type, heads):
    assert digest(attended(isa, kv_type, heads)) == recorded("attention")[f"{kv_type} {heads}"]


if __name__ == "__main__":
    record = {
        "products": {name: digest(product("avx2", name)) for name in linear.TYPES},
        "attention": {f"{t} {heads}": digest(attended("avx2", t, heads)) for t in attention.TYPES for heads in (1, 5)},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")

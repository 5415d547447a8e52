"""Stored rows packed by vectors: the bytes are those of the plain way (ISA baseline), and nothing beside the rows is
read.
"""

import ctypes
import mmap

import numpy as np
import pytest

from ckdist.native import check, ffi, lib, pointer
from tests.support.cases import cases
from tests.support.levels import HERE, VECTORS
from tests.support.products import TYPES, block_of, number

PAGE = mmap.PAGESIZE
GUARDED = 1 << 20
VECTOR_ISAS = [isa for isa in HERE if isa in VECTORS and isa != "baseline"]


@pytest.fixture(scope="module")
def guarded():
    """Memory between two pages that nobody may read."""
    libc = ctypes.CDLL(None, use_errno=True)
    area = mmap.mmap(-1, GUARDED + 2 * PAGE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(area))
    guards = [ctypes.c_void_p(begin), ctypes.c_void_p(begin + PAGE + GUARDED)]
    assert not any(libc.mprotect(guard, PAGE, 0) for guard in guards)
    yield np.frombuffer(area, np.uint8)[PAGE : PAGE + GUARDED]
    assert not any(libc.mprotect(guard, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) for guard in guards)


def packed(isa, name, source, rows, cols):
    tiles = np.full(-(-rows // 16) * check(lib.ckdist_tile_bytes(isa.encode(), number(name), cols)), 0xFF, np.uint8)
    stored = ffi.cast("uint8_t *", source.ctypes.data)
    check(
        lib.ckdist_pack(
            isa.encode(), number(name), rows, cols, stored, source.size, pointer(tiles, "uint8_t *"), tiles.size
        )
    )
    return tiles


@cases("name", TYPES)
def test_every_isa_packs_the_same_bytes_and_reads_nothing_else(guarded, name):
    elements, size = block_of(name)
    long = 9000 // size + 1  # blocks of a row that is packed in two strips
    shapes = (
        [(rows, blocks) for rows in range(1, 17) for blocks in (1, 3, 17)]
        + [(16, n) for n in (2, 15, 16, 31, 32, 33, 77, long)]
        + [(50, 40)]
    )
    for rows, blocks in shapes:
        cols = blocks * elements
        data = np.random.default_rng(rows * blocks).integers(0, 256, rows * blocks * size, np.uint8)
        plain = packed("baseline", name, data, rows, cols)
        for isa in VECTOR_ISAS:
            for place in (guarded[-data.size :], guarded[: data.size]):
                place[:] = data
                np.testing.assert_array_equal(
                    packed(isa, name, place, rows, cols), plain, err_msg=f"{isa} {rows} x {cols}"
                )

"""Copies with streaming stores."""

import ctypes
import os
import platform
from pathlib import Path

import numpy as np
import pytest

from tests.support.compiled import NATIVE, OURS, compiled

LINE = 64


@pytest.fixture(scope="module")
def streams():
    """The copies with the calls of tests/native/stream_copy.cpp."""
    flags = ["-O0", "-g", "-Wall", "-Wextra", "-Werror", *os.environ.get("CKDIST_TEST_CXXFLAGS", "").split()]
    sources = [OURS / "stream_copy.cpp", NATIVE / "core/stream_copy.cpp"]
    library = compiled("stream_copy", sources, *flags, "-shared", "-fPIC")
    return ctypes.CDLL(str(library))


def at(array, offset=0):
    return ctypes.c_void_p(array.ctypes.data + offset)


def random_bytes(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("vector_bytes", (16, 32, 64))
def test_odd_sizes_at_odd_places(streams, vector_bytes):
    data = random_bytes(4096, vector_bytes)
    for size in (0, 1, 15, 63, 64, 65, 127, 128, 129, 1000, 3001):
        for to in (0, 1, 31, 63):
            for start in (0, 7, 64):
                out = np.full(4096 + 128, 0xEE, np.uint8)
                base = -out.ctypes.data % LINE + to
                if not streams.stream_copy(vector_bytes, at(out, base), at(data, start), ctypes.c_int64(size)):
                    pytest.skip("not on this CPU")
                expected = np.full_like(out, 0xEE)
                expected[base : base + size] = data[start : start + size]
                np.testing.assert_array_equal(out, expected)


def test_widest(streams):
    if platform.machine() not in ("x86_64", "AMD64"):
        assert streams.widest_stream_bytes() == 0
        return
    flags = Path("/proc/cpuinfo").read_text()
    widest = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
    limit = {"baseline": 16, "avx2": 32, "avx2_vnni": 32}.get(os.environ.get("CKDIST_ISA"), 64)
    assert streams.widest_stream_bytes() == min(widest, limit)

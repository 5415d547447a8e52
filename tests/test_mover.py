"""Movers: streaming stores, and an Intel DSA queue over a device in software that reads descriptors as the hardware would."""

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "ckdist/native"
LINE = 64


@pytest.fixture(scope="module")
def movers(tmp_path_factory):
    """The movers with the calls of tests/native/movers.cpp."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("movers") / "movers.so"
    sources = [ROOT / "tests/native/movers.cpp", *sorted((NATIVE / "movers").glob("*.cpp")), NATIVE / "core/numa.cpp", NATIVE / "core/error.cpp"]
    extra = os.environ.get("CKDIST_TEST_CXXFLAGS", "").split()
    built = subprocess.run(
        [compiler, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *extra, "-shared", "-fPIC", f"-I{NATIVE}", *sources, "-o", library, "-pthread"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(library))


def at(array, offset=0):
    return ctypes.c_void_p(array.ctypes.data + offset)


def random_bytes(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class TestStreams:
    @pytest.mark.parametrize("vector_bytes", (16, 32, 64))
    def test_odd_sizes_at_odd_places(self, movers, vector_bytes):
        data = random_bytes(4096, vector_bytes)
        for bytes in (0, 1, 15, 63, 64, 65, 127, 128, 129, 1000, 3001):
            for to in (0, 1, 31, 63):
                for start in (0, 7, 64):
                    out = np.full(4096 + 128, 0xEE, np.uint8)
                    base = -out.ctypes.data % LINE + to
                    if not movers.stream_copy(vector_bytes, at(out, base), at(data, start), ctypes.c_int64(bytes)):
                        pytest.skip("not on this CPU")
                    expected = np.full_like(out, 0xEE)
                    expected[base : base + bytes] = data[start : start + bytes]
                    np.testing.assert_array_equal(out, expected)

    def test_widest(self, movers):
        if platform.machine() not in ("x86_64", "AMD64"):
            assert movers.widest_stream_bytes() == 0
            return
        flags = Path("/proc/cpuinfo").read_text()
        widest = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
        limit = {"baseline": 16, "avx2": 32}.get(os.environ.get("CKDIST_ISA"), 64)
        assert movers.widest_stream_bytes() == min(widest, limit)

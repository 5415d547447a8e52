"""The native library with a model of AMX's tiles (tests/native/tile_model.h): level `amx` on CPUs without AMX."""

import ctypes
import fcntl
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckdist import native
from tests.support.paths import ROOT

BUILD = ROOT / "build/native"
LIBRARY = BUILD / "libckdist_tiles.so"


def build() -> str:
    """Builds the library. Returns why it cannot be: an empty string if it could."""
    if lacks := native.isas().get("avx512_bf16", "a build of level avx512_bf16"):
        return f"level avx512_bf16: this CPU lacks {lacks}"  # which runs the kernels around the tiles
    if not (BUILD / "CMakeCache.txt").exists():
        return "no build folder: `make native` makes it"
    cmake = Path(sys.executable).with_name("cmake")
    command = [str(cmake) if cmake.exists() else shutil.which("cmake"), "--build", BUILD, "--target", "ckdist_tiles"]
    with open(BUILD / "tiles.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    if "unrecognized command" in done.stdout or "unknown argument" in done.stdout:
        return "the compiler has no AMX"
    assert done.returncode == 0, done.stdout + done.stderr
    return ""


@functools.cache
def why_not() -> str:
    return build() or lacking()


def lacking() -> str:
    library = open_library()[0]
    level = 0
    while native.ffi.string(library.ckdist_isa_name(level)) != b"amx":
        level += 1
    lacks = native.ffi.string(library.ckdist_isa_lacks(level)).decode()
    return lacks and f"level amx: this CPU lacks {lacks}"


@functools.cache
def open_library():
    """The library's functions for Python, and those of the model."""
    model = ctypes.CDLL(str(LIBRARY))
    for name in ("tile_peak", "tiles_are_live"):
        getattr(model, name).restype = ctypes.c_int64 if name == "tile_peak" else ctypes.c_int
    return native.ffi.dlopen(str(LIBRARY)), model


def tile_library():
    """Skips the test if the library cannot be here."""
    if reason := why_not():
        pytest.skip(reason)
    return open_library()


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(f"skipped: {reason}")

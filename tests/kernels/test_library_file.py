"""The native library as the loader sees it: what the compiler and linker can do against overflows is switched on."""

import os
import shutil
import subprocess

import pytest

from tests.support.paths import ROOT

LIBRARY = ROOT / "ckdist/native/libckdist.so"
pytestmark = pytest.mark.skipif(
    "CKDIST_LIBRARY" in os.environ or not shutil.which("readelf"), reason="another build of the library, or no readelf"
)


def read(*flags: str) -> str:
    return subprocess.run(
        ["readelf", "-W", *flags, LIBRARY],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LC_ALL": "C"},
    ).stdout


def test_addresses_are_bound_at_load_and_read_only_after():
    assert "GNU_RELRO" in read("-l") and "NOW" in read("-d")


def test_the_stack_is_guarded_and_not_executable():
    (stack,) = [line for line in read("-l").splitlines() if "GNU_STACK" in line]
    assert " RW " in stack and "E" not in stack.split()[-2]
    assert "__stack_chk_fail" in read("--dyn-syms")


def test_calls_of_the_c_library_check_sizes():
    assert "_chk@" in read("--dyn-syms").replace("__stack_chk_fail", "")

"""C++ that tests compile for themselves, kept in build/tests until a source, a flag or the compiler is another."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NATIVE, OURS = ROOT / "ckdist/native", ROOT / "tests/native"


def compiled(name: str, sources: Sequence[Path], *flags: str, unknown: Sequence[str] = ()) -> Path:
    """The program or library `name`. Skips the test where there is no compiler, or where its message has a word of
    `unknown`: it cannot do what the flags ask for.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++17", f"-I{NATIVE}", f"-I{OURS}", *flags, *map(str, sources)]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    digest = hashlib.sha256(repr([version, command]).encode())
    for folder in (NATIVE, OURS):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cpp")):
            digest.update(path.read_bytes())
    built = ROOT / "build/tests" / f"{name}-{digest.hexdigest()[:16]}"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    temporary = built.with_name(f"{built.name}.{os.getpid()}")
    done = subprocess.run([*command, "-o", str(temporary)], capture_output=True, text=True, timeout=300)
    if done.returncode and any(word in done.stderr for word in unknown):
        pytest.skip(f"{compiler} lacks what {name} asks for")
    assert done.returncode == 0, done.stderr
    for old in built.parent.glob(f"{name}-*"):
        if old != temporary and "." not in old.name:
            old.unlink(missing_ok=True)
    temporary.replace(built)
    return built

"""C++ that tests compile for themselves, kept in build/tests until a source, a flag or the compiler is another."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NATIVE, OURS = ROOT / "ckdist/native", ROOT / "tests/native"


def compiled(name: str, sources: Sequence[Path], *flags: str, unknown: Sequence[str] = ()) -> Path:
    """The program or library `name`. Skips the test where there is no compiler, or where its message has a word of
    `unknown`: it cannot do what the flags ask for.

    Each source is an object of its own, through ccache if there is one. One process compiles, and others wait for it.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++17", *(f"-I{folder.relative_to(ROOT)}" for folder in (NATIVE, OURS)), *flags]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    digest = hashlib.sha256(repr([version, command, list(map(str, sources))]).encode())
    for folder in (NATIVE, OURS):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".h", ".cpp")):
            digest.update(path.read_bytes())
    built = ROOT / "build/tests" / f"{name}-{digest.hexdigest()[:16]}"
    built.parent.mkdir(parents=True, exist_ok=True)
    with open(built.parent / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            error = compile_and_link(command, sources, built)
            if error and any(word in error for word in unknown):
                pytest.skip(f"{compiler} lacks what {name} asks for")
            assert not error, error
            for old in built.parent.glob(f"{name}-*"):
                if old != built:
                    old.unlink(missing_ok=True)
    return built


def compile_and_link(command: list[str], sources: Sequence[Path], built: Path) -> str:
    """Returns the compiler's message if it fails, else an empty string."""

    def run(words: list[str]) -> str:
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
        return done.stderr or f"{words[0]} ended with {done.returncode}" if done.returncode else ""

    # Objects of another checkout are the same: paths are relative.
    environment = {"CCACHE_NOHASHDIR": "1", **os.environ}
    launcher = ["ccache"] if shutil.which("ccache") else []
    compiling = [*launcher, *(word for word in command if word != "-shared"), "-c"]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [f"{folder}/{index}.o" for index in range(len(sources))]
        words = [
            [*compiling, str(source.relative_to(ROOT)), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        if errors := "".join(pool.map(run, words)):
            return errors
        if errors := run([*command, *objects, "-o", f"{folder}/linked"]):
            return errors
        Path(folder, "linked").replace(built)
    return ""

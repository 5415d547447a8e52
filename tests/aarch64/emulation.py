"""Tests of kernels on 64-bit Arm, emulated: the wheel is cross-built, and Debian's Python for Arm runs the tests on it.

QEMU translates one program at a time and passes its system calls to this host, so what is right or wrong can be learnt
in it, and nothing about speed; nor about the order of memory between threads, which is this host's.
`python -m tests.aarch64.emulation [pytest's words]` runs SUITE, or what the words name, on each of CPUS;
CKDIST_AARCH64_CPUS names some of them alone.
"""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
PARTS = pathlib.Path(os.environ.get("CKDIST_AARCH64") or pathlib.Path.home() / ".cache" / "ckdist-aarch64")
BUILD = ROOT / "build" / "aarch64"
PYTHON = BUILD / "python"
PYTHON_VERSION = "3.11"  # of Debian 12
# The emulated CPUs, and what is run of the suite: on the second, what asks for the instructions that the first lacks.
CPUS = {"cortex-a72": [], "neoverse-n1": ["-k", "neon_dotprod"], "max": []}
SUITE = [
    "tests/kernels",
    "tests/fuzz/test_native_fuzz.py",
    "tests/models/test_gguf.py",
    "tests/models/test_loader.py",
]
# The emulator's own /proc/PID/stat has no start time, so ranks that wait for one another take each other for dead.
RANKS = [
    "--deselect=tests/kernels/test_native_training.py::test_ranks_share_gradients",
    "--deselect=tests/kernels/test_optimizer.py::test_state_cut_over_ranks_gives_what_one_rank_gives",
]
# Limits of memory are the emulator's, and so are seconds.
HOST = [
    "--deselect=tests/models/test_loader.py::test_more_than_the_memory_names_both_numbers",
    "--deselect=tests/models/test_gguf.py::test_large_vocabulary_is_read_fast",
]
RUN_SECONDS = 3600


def prepare() -> str:
    """Fetches packages where they are missing; the reason why there can be no emulation here, or ""."""
    if os.uname().machine != "x86_64" or not shutil.which("apt-get"):
        return "Arm is emulated on x86-64 Debian"
    if not (PARTS / "ready").exists() and os.geteuid():
        return "setting up the emulation installs packages: run `make test-aarch64` as root once"
    environment = {**os.environ, "CKDIST_AARCH64": str(PARTS)}
    done = subprocess.run([HERE / "prepare.sh"], env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        return f"the emulation could not be set up: {done.stderr.strip()[-300:]}"
    if not (PARTS / "tools").exists():
        pip("install", "--quiet", "--target", str(PARTS / "tools"), "scikit-build-core", "cmake", "ninja")
    fetch_wheels()
    return ""


def pip(*words: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed:\n{done.stderr[-3000:]}")


def unpack(target: pathlib.Path, *words: str) -> None:
    """Installs wheels for the emulated Python into a folder of their own."""
    platforms = [f"--platform={tag}_aarch64" for tag in ("manylinux_2_28", "manylinux_2_17", "linux")]
    python = ["--python-version", PYTHON_VERSION, "--implementation", "cp", "--only-binary=:all:"]
    pip("install", "--quiet", "--upgrade", "--target", str(target), *platforms, *python, *words)


def fetch_wheels() -> None:
    """What the project and its tests require, as pyproject.toml says; again where that changed."""
    parts = [text.replace("'", '"').partition(";") for text in importlib.metadata.requires("ckdist") or ()]
    names = sorted(name.strip() for name, _, condition in parts if not condition or 'extra == "test"' in condition)
    listed = PARTS / "site.txt"
    if listed.exists() and listed.read_text() == "\n".join(names):
        return
    unpack(PARTS / "site", *names)
    listed.write_text("\n".join(names))


def build() -> pathlib.Path:
    """The library out of the wheel that `pip wheel` makes of this checkout for Arm."""
    shutil.rmtree(BUILD / "wheel", ignore_errors=True)
    settings = [f"build-dir={BUILD / 'cmake'}", f"cmake.define.CMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64.cmake'}"]
    words = [f"--config-settings={setting}" for setting in settings]
    # The platform is the wheel's, so the build's own programs, which are this host's, are not pip's to fetch.
    tools = PARTS / "tools"
    environment = {"PYTHONPATH": str(tools), "PATH": f"{tools / 'bin'}:{os.environ['PATH']}"}
    words = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(BUILD / "wheel"), *words, str(ROOT)]
    pip("wheel", *words, _PYTHON_HOST_PLATFORM="linux-aarch64", **environment)
    (wheel,) = (BUILD / "wheel").glob("ckdist-*-linux_aarch64.whl")
    unpack(BUILD / "installed", "--no-deps", str(wheel))
    return BUILD / "installed" / "ckdist" / "native" / "libckdist.so"


def write_python() -> None:
    """A program that is Python for Arm to every program that starts it, such as tests that start `sys.executable`."""
    root = PARTS / "root"
    emulator = f'qemu-aarch64-static -cpu "$CKDIST_EMULATED_CPU" -L {root} -0 {PYTHON}'
    PYTHON.write_text(f'#!/bin/sh\nexec {emulator} {root}/usr/bin/python{PYTHON_VERSION} "$@"\n')
    PYTHON.chmod(0o755)


def environment_of(cpu: str, library: pathlib.Path) -> dict[str, str]:
    """Where the emulated Python finds what. Compilers that tests start are this host's, and build for Arm."""
    return {
        **os.environ,
        "CKDIST_EMULATED_CPU": cpu,
        "PYTHONHOME": str(PARTS / "root" / "usr"),
        "PYTHONPATH": f"{ROOT}:{PARTS / 'site'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CKDIST_LIBRARY": str(library),
        "CXX": "aarch64-linux-gnu-g++",
    }


def main(words: list[str]) -> int:
    if reason := prepare():
        print(reason)
        return 2
    library = build()
    write_python()
    wanted = os.environ.get("CKDIST_AARCH64_CPUS", " ".join(CPUS)).split()
    failed = []
    for cpu in wanted:
        command = [
            PYTHON,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(words or [*CPUS.get(cpu, []), *RANKS, *HOST, *SUITE]),
        ]
        print(f"--- {cpu}: {' '.join(map(str, command[3:]))}", flush=True)
        start = time.monotonic()
        code = subprocess.run(command, env=environment_of(cpu, library), cwd=ROOT, timeout=RUN_SECONDS).returncode
        print(f"--- {cpu}: ended with {code} after {time.monotonic() - start:.0f} s", flush=True)
        if code:
            failed.append(cpu)
    if failed:
        print(f"failed on {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`make test-wheel`: builds the wheel, looks into it, and runs the command from it in an environment and a folder of
its own.

A program and not a test of pytest: if the library was built for this CPU alone, it compiles the other levels.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).parent.parent
WANTED = (
    "native/libckdist.so",
    "native/declarations.py",
    "models/bundled/config.json",
    "models/bundled/tokenizer.json",
    "models/bundled/README.md",
    "cli/main.py",
    "serve/page/index.html",
    "serve/page/app.js",
    "py.typed",
)
UNWANTED = (
    "native/api/",
    "/kernels/",
    "/runtime/",
    "/bindings/",
    "/core/",
    "/copy_engines/",
    "native/comm/",
    ".cpp",
    "CMakeLists",
    "tests/",
    "__pycache__",
)


def run(*words: object, **more) -> str:
    """A program's standard output; its standard error passes through."""
    return subprocess.run([str(word) for word in words], check=True, stdout=subprocess.PIPE, text=True, **more).stdout


def build(folder: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(folder, ignore_errors=True)
    # The checkout's build folder, with its cmake: what is compiled already is not compiled again.
    settings = [f"--config-settings={key}" for key in ("build-dir=build/native", "cmake.define.CKDIST_LEVELS=all")]
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *(*settings, "--wheel-dir", folder, ROOT),
    )
    (wheel,) = folder.glob("ckdist-*.whl")
    return wheel


def check_contents(wheel: pathlib.Path) -> None:
    python, abi, platform = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none") and platform.startswith("linux_"), (
        f"{wheel.name} is not tagged py3-none-linux_*"
    )
    names = zipfile.ZipFile(wheel).namelist()
    for name in WANTED:
        assert f"ckdist/{name}" in names, f"{wheel.name} has no {name}"
    assert any(name.startswith("ckdist/models/bundled/model") for name in names), f"{wheel.name} has no bundled weights"
    for name in names:
        assert not any(part in name for part in UNWANTED), f"{wheel.name} has {name}"
    page = [info.file_size for info in zipfile.ZipFile(wheel).infolist() if "/serve/page/" in info.filename]
    assert sum(page) < 150_000, f"the page has {sum(page)} bytes"
    assert wheel.stat().st_size < 32 << 20, f"{wheel.name} has {wheel.stat().st_size} bytes"


def check_command(wheel: pathlib.Path, home: pathlib.Path) -> None:
    """The command of a new environment without MPI, from a folder that is not the checkout."""
    run(sys.executable, "-m", "venv", home / "venv")
    python = home / "venv/bin/python"
    run(python, "-m", "pip", "install", "--quiet", wheel)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OMPI", "PMI", "CKDIST"))
    }
    ckdist = lambda *words: run(home / "venv/bin/ckdist", *words, cwd=home, env=environment)
    where = run(python, "-c", "import ckdist; print(ckdist.__file__)", cwd=home, env=environment).strip()
    assert where.startswith(str(home)), f"the installed ckdist lies at {where}"
    assert (
        run(python, "-c", "import importlib.util as u; print(u.find_spec('mpi4py'))", cwd=home, env=environment).strip()
        == "None"
    )
    assert ckdist("--version").strip() == wheel.name.split("-")[1]
    result = json.loads(
        ckdist("generate", "-p", "def main(", "-n", "8", "--temp", "0", "-t", "1", "-c", "256", "--json")
    )
    assert len(result["token_ids"]) == 8 and result["finish_reason"] == "length", result


with tempfile.TemporaryDirectory() as name:
    wheel = build(pathlib.Path(sys.argv[1]).resolve())
    check_contents(wheel)
    check_command(wheel, pathlib.Path(name))
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, installs and runs")

"""`make test-wheel`: builds the wheel, looks into it, and runs the command from it in an environment and a folder of
its own, on each Python that is here.

A program and not a test of pytest: if the library was built for this CPU alone, it compiles the other levels.
"""

import concurrent.futures
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
    "native/comm/",
    ".cpp",
    "CMakeLists",
    "tests/",
    "__pycache__",
)
IMPORTS = """
import importlib, pkgutil, ckdist
for module in pkgutil.walk_packages(ckdist.__path__, "ckdist."):
    if not module.name.endswith((".libckdist", ".__main__")):
        importlib.import_module(module.name)
"""


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


def pythons() -> list[str]:
    """This Python, and each other version from 3.10 on that pyenv has here."""
    found = {sys.version_info[:2]: sys.executable}
    for python in sorted(
        pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob("versions/3.*/bin/python")
    ):
        version = tuple(int(number) for number in python.parts[-3].split(".")[:2] if number.isdigit())
        if version >= (3, 10):
            found.setdefault(version, str(python))
    return list(found.values())


def check_command(wheel: pathlib.Path, home: pathlib.Path, base: str) -> str:
    """The command of a new environment without MPI, from a folder that is not the checkout. Returns the version of
    Python.
    """
    python = home / "venv/bin/python"
    run(base, "-m", "venv", "--without-pip", home / "venv")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", wheel)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OMPI", "PMI", "CKDIST"))
    }
    ckdist = lambda *words: run(home / "venv/bin/ckdist", *words, cwd=home, env=environment)
    told = "import ckdist, importlib.util as u; print(ckdist.__file__, u.find_spec('mpi4py'))"
    where, mpi = run(python, "-c", told, cwd=home, env=environment).split()
    assert where.startswith(str(home)), f"the installed ckdist lies at {where}"
    assert mpi == "None"
    assert ckdist("--version").strip() == wheel.name.split("-")[1]
    result = json.loads(
        ckdist("generate", "-p", "def main(", "-n", "8", "--temp", "0", "-t", "1", "-c", "256", "--json")
    )
    assert len(result["token_ids"]) == 8 and result["finish_reason"] == "length", result
    run(python, "-c", IMPORTS, cwd=home, env=environment)
    return run(python, "--version").split()[1]


with tempfile.TemporaryDirectory() as name:
    wheel = build(pathlib.Path(sys.argv[1]).resolve())
    check_contents(wheel)
    homes = [pathlib.Path(name, str(index)) for index in range(len(pythons()))]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        versions = list(pool.map(check_command, [wheel] * len(homes), homes, pythons()))
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, installs and runs on Python {', '.join(versions)}")

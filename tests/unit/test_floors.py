"""A file imports only from lower floors, or from its own (docs/architecture.md: The floors)."""

import ast
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

from tests.support.paths import ROOT
from tests.unit.test_requirements import OPTIONAL, WANTED

ROOT = ROOT / "ckdist"
FLOORS = {
    "errors": 0,
    "native": 0,
    "config": 1,
    "overrides": 1,
    "topology": 1,
    "comm": 1,
    "ended_threads": 1,
    "hub": 1,
    "launcher": 1,
    "layout": 1,
    "mesh": 1,
    "prctl": 1,
    "process_end": 1,
    "progress": 1,
    "python_words": 1,
    "regular_file": 1,
    "figure": 1,
    "terminal": 1,
    "text_file": 1,
    "program": 2,
    "weights": 3,
    "models": 3,
    "tokens": 3,
    "layouts": 4,
    "worker": 4,
    "engine": 5,
    "train": 5,
    "serve": 6,
    "plan": 7,
    "cli": 7,
}
ANNEX_USERS = (
    *("bench_machine", "bench_steps", "doctor", "plan", "plan_mixed", "plan_training", "simulate"),
    "simulate_training",
)
FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.stem not in ("__init__", "__main__"))


def floor(module: str) -> int:
    parts = module.split(".")
    return FLOORS[parts[1]] if len(parts) > 1 else max(FLOORS.values())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node. Expressions hold none, and are not searched."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


@functools.cache  # three tests read all files
def all_imported(path: pathlib.Path) -> tuple[str, ...]:
    """The modules that a file imports."""
    names: list[str] = []
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "ckdist":
            names += [f"ckdist.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return tuple(names)


def imported(path: pathlib.Path) -> list[str]:
    """The project's modules that a file imports."""
    return [name for name in all_imported(path) if name.split(".")[0] == "ckdist" and name != "ckdist.__version__"]


def test_imports_go_down():
    above = []
    for path in FILES:
        room = path.relative_to(ROOT).with_suffix("").parts[0]
        own = FLOORS[room]
        above += [
            f"{path.relative_to(ROOT)} (floor {own}) imports {name} (floor {floor(name)})"
            for name in imported(path)
            if floor(name) > own
        ]
    assert len(FILES) > 300 and not above, "\n".join(above)


def test_only_commands_import_the_annex():
    """`serve` and `train` start without `ckdist.plan`. Their commands load no other command."""
    users = {
        p.relative_to(ROOT).as_posix()
        for p in FILES
        if any(f"{name}.".startswith("ckdist.plan.") for name in imported(p))
    }
    outside = {user for user in users if not user.startswith("plan/")}
    assert outside == {f"cli/{name}.py" for name in ANNEX_USERS}
    started = "ckdist.cli.serve_rank_0, ckdist.cli.train, ckdist.serve.run, ckdist.train.trainer"
    code = f"import sys, {started}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "ckdist.layouts.rank_plan" in loaded and "ckdist.plan" not in loaded


DISTRIBUTIONS = {"cffi": "_cffi_backend", "opentelemetry-sdk": "opentelemetry", "pyzmq": "zmq"}


def test_everything_imported_is_asked_for():
    """By pyproject.toml."""
    names = [re.match(r"[\w.-]+", line)[0] for line in WANTED + OPTIONAL]
    known = (
        {DISTRIBUTIONS.get(name, name).replace("-", "_").lower() for name in names}
        | set(sys.stdlib_module_names)
        | {"ckdist", "tomllib", "_typeshed"}  # the last one is the type checkers' own
    )
    found = {name.partition(".")[0].lower(): path for path in ROOT.rglob("*.py") for name in all_imported(path)}
    assert "numpy" in found and not {module: path for module, path in found.items() if module not in known}


# What each floor of the native code includes beside itself and api, which holds plain C declarations.
NATIVE_BELOW = {
    "api": set(),
    "core": set(),
    "comm": {"core", "kernels"},
    "kernels": {"core"},
    "runtime": {"core", "comm", "kernels"},
    "bindings": {"core", "comm", "kernels", "runtime"},
}
NATIVE_FILES = sorted(p for p in (ROOT / "native").rglob("*") if p.suffix in (".h", ".cpp"))


def test_includes_go_down():
    above = []
    for path in NATIVE_FILES:
        own = path.relative_to(ROOT / "native").parts[0]
        above += [
            f"{path.relative_to(ROOT)} includes {room}"
            for room in re.findall(r'^#include "([a-z_]+)/', path.read_text(), re.MULTILINE)
            if room not in NATIVE_BELOW[own] | {own, "api"}
        ]
    assert len(NATIVE_FILES) > 200 and not above, "\n".join(above)


def test_the_table_of_the_documentation_has_every_room():
    rows = re.findall(r"^\| (\d) \| (.+) \|$", (ROOT.parent / "docs/architecture.md").read_text(), re.MULTILINE)
    assert {room: int(number) for number, rooms in rows for room in re.findall(r"`(\w+)`", rooms)} == FLOORS


ROOMS = "ckdist|tests|docs|benchmarks|launch|native|comm|core|kernels|isa|runtime|bindings|transports"
NAMED = re.compile(rf"(?<![\w/.])((?:{ROOMS})/[\w/-]+\.(?:py|h|cpp|md))\b")


def test_paths_that_comments_name_are_there():
    """In code, of the project's own rooms; a path may leave out the folders above its room."""
    known = [
        p.relative_to(ROOT.parent).as_posix()
        for room in ROOT.parent.iterdir()
        if room.is_dir() and room.name in ("ckdist", "tests", "docs", "benchmarks", "launch")
        for p in room.rglob("*.*")
    ]
    listed = "".join(f"/{path}\n" for path in known)
    lines = [
        (path.name, name)
        for path in [*FILES, *NATIVE_FILES, *(ROOT.parent / "tests").rglob("*.py")]
        for name in NAMED.findall(path.read_text())
    ]
    gone = [line for line in lines if f"/{line[1]}\n" not in listed]
    assert len(lines) > 50 and not gone

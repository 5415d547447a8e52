"""What pyproject.toml asks for: all that is imported, and no version that nobody has tried."""

import ast
import re
import sys

from tests.support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WANTED = PROJECT["project"]["dependencies"]
OPTIONAL = [line for lines in PROJECT["project"]["optional-dependencies"].values() for line in lines]
MODULES = {"pyzmq": "zmq"}  # where a module is not named like its distribution


def test_every_version_has_both_bounds():
    unbound = [
        line
        for line in WANTED + OPTIONAL + PROJECT["build-system"]["requires"]
        if "==" not in line and not (">=" in line and "<" in line.replace("<=", ""))
    ]
    assert not unbound


def test_everything_imported_is_asked_for():
    names = [re.match(r"[\w.-]+", line)[0] for line in WANTED + OPTIONAL]
    known = (
        {MODULES.get(name, name).replace("-", "_").lower() for name in names}
        | set(sys.stdlib_module_names)
        | {"ckdist", "tomllib"}
    )
    imported = {}
    for path in (ROOT / "ckdist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            imported |= {module.partition(".")[0].lower(): str(path.relative_to(ROOT)) for module in modules}
    assert not {module: where for module, where in imported.items() if module not in known}

"""Benchmarks are run by hand: what they import of ckdist is there."""

import ast
import importlib
import importlib.util

from tests.support.cases import cases
from tests.support.paths import ROOT


@cases("path", sorted((ROOT / "benchmarks").glob("*.py")))
def test_what_a_benchmark_imports_is_there(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ckdist":
            module = importlib.import_module(node.module)
            for alias in node.names:
                there = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                assert there, f"{path.name} imports {alias.name} of {node.module}"

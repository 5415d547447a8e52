"""The versions in pyproject.toml: each has been tried."""

import re
import sys

from packaging.requirements import Requirement

from tests.support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WANTED = PROJECT["project"]["dependencies"]
OPTIONAL = [line for lines in PROJECT["project"]["optional-dependencies"].values() for line in lines]


def test_every_version_has_both_bounds():
    unbound = [
        line
        for line in WANTED + OPTIONAL + PROJECT["build-system"]["requires"]
        if "==" not in line and not (">=" in line and "<" in line.replace("<=", ""))
    ]
    assert not unbound


def test_the_lock_satisfies_the_bounds_on_every_python():
    lines = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
    assert not any(line.extras for line in lines)  # pip refuses extras in constraints
    groups = PROJECT["project"]["optional-dependencies"]
    locked = WANTED + [line for name in ("build", "docs", "lint", "mpi", "test", "train") for line in groups[name]]
    for python in ("3.10", "3.11", "3.12", "3.13"):
        place = {"python_version": python, "python_full_version": python + ".9", "sys_platform": "linux"}
        here = {name_of(line): line for line in lines if line.marker is None or line.marker.evaluate(place)}
        for wanted in map(Requirement, locked):
            if wanted.marker is None or wanted.marker.evaluate(place):
                (pin,) = here[name_of(wanted)].specifier
                assert pin.operator == "==" and pin.version in wanted.specifier, f"{wanted} on Python {python}: {pin}"


def name_of(wanted: Requirement) -> str:
    return re.sub(r"[-_.]+", "-", wanted.name).lower()

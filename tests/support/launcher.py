"""Runs a Python program as the ranks of one job under mpirun, oversubscribed where it has to be, within a time
limit.
"""

import os
import pathlib
import shutil
import subprocess
import sys

from tests.support.paths import ROOT

STUB: list[str] = []  # words before those of a rank, with which it is a fork (tests/support/stubs.py)
CHILD_MODULES = ROOT / "tests/support/child_modules"  # no matplotlib: a picture takes longer than a training; few polls


def environment() -> dict[str, str]:
    """This process's environment with the checkout importable, matplotlib not, few polls, and mpirun willing to run as
    root.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(CHILD_MODULES), os.environ.get("PYTHONPATH")])),
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def one_host() -> dict[str, str]:
    """The environment of a job on this host, which takes one form of prefill instead of measuring both at each start.
    On cores that other tests use, the result is unsure, and is not kept. Texts have the same bits in either form.
    """
    return {"CKDIST_PREFILL": "tensor", **environment()}


def mpirun(ranks: int) -> list[str]:
    """The words that start `ranks` ranks of a Python program; the program follows."""
    launcher = shutil.which("mpirun", path=environment()["PATH"])
    assert launcher, "mpirun is missing: pip install 'ckdist[mpi]'"
    return [launcher, "-n", str(ranks), sys.executable]


def run_ranks(ranks: int, *words: str, timeout: float = 120, **more) -> subprocess.CompletedProcess:
    """Runs `python words...` on `ranks` ranks (1: without mpirun) and returns its code and output as text."""
    command = [] if ranks == 1 else [*mpirun(ranks)[:-1], *STUB]
    return subprocess.run(
        [*command, sys.executable, *words],
        env={**one_host(), **more.pop("env", {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=more.pop("cwd", ROOT),
    )

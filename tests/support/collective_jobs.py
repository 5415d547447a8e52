"""Options and processes of the communicator's tests."""

import subprocess

import numpy as np

from tests.support.launcher import environment
from tests.support.paths import ROOT

HYBRID_HOSTS = {2: "ab", 3: "aab", 4: "abab", 5: "aabab", 7: "abbcaab"}


def options(transport: str, ranks: int):
    """The hosts to pretend, and what to open."""
    if transport == "shared":
        return "a" * ranks, {}
    if transport == "tcp":
        return "a" * ranks, {"transport": "tcp"}
    hosts = HYBRID_HOSTS[ranks]
    return hosts, {"transport": "tcp", "share": transport == "hybrid"}


WRONG_CALLS = {  # what all ranks but the last call, and what the last does
    "size": (lambda c, x: c.all_reduce(x), lambda c, x: c.all_reduce(x[1:])),
    "algorithm": (lambda c, x: c.all_reduce(x), lambda c, x: c.all_reduce(np.tile(x, 50))),
    "operation": (lambda c, x: c.all_reduce(x), lambda c, x: c.all_reduce(x, "max")),
    "dtype": (lambda c, x: c.all_reduce(x), lambda c, x: c.all_reduce(x.view(np.int32))),
    "kind": (lambda c, x: c.all_reduce(x), lambda c, x: c.broadcast(x)),
    "root": (lambda c, x: c.broadcast(x), lambda c, x: c.broadcast(x, root=1)),
}


def start_program(command: list[str], variables: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        env={**environment(), **variables},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

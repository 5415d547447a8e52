"""A server that ends frees its model after the last thread that reads it."""

import os
import subprocess
import sys

import pytest

from ckdist.engine.socket_directory import DIRECTORY
from tests.support.launcher import one_host
from tests.support.paths import ROOT
from tests.support.ports import free_port


@pytest.mark.parametrize("is_routed", [False, True], ids=["http", "router"])
def test_no_status_reads_a_freed_model(tmp_path, is_routed):
    words = ("serve", "--port", str(free_port()), "-t", "1", "-c", "64")
    env = one_host() | ({DIRECTORY: str(tmp_path)} if is_routed else {})
    os.chmod(tmp_path, 0o700)
    server = subprocess.Popen(
        [sys.executable, "tests/support/programs/slow_free.py", *words],
        env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        lines = iter(server.stdout.readline, "")
        assert any(("ready" if is_routed else "serving ") in line for line in lines)
        server.terminate()
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.communicate()

"""A process that ends without the interpreter's teardown, or before it has imported its command."""

import os
import subprocess
import sys

import pytest
import tomllib

from tests.support.paths import ROOT

PROGRAM = """
import atexit, threading
from ckdist.process_end import end_process
atexit.register(print, "the exit handler ran")
go_on = threading.Event()
thread = threading.Thread(target=go_on.wait)
thread.start()
end_process(3)
print("a thread works")
go_on.set()
thread.join()
end_process(3)
print("not reached")
"""


def test_it_waits_for_threads_and_runs_exit_handlers():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "a thread works\nthe exit handler ran\n"), done.stderr


WITH_MPI = """
from mpi4py import MPI
from ckdist.process_end import end_process
end_process(3)
print("MPI is not ended", flush=True)
MPI.Finalize()
end_process(3)
print("not reached")
"""


def test_it_leaves_mpi_to_the_teardown_unless_the_job_was_left():
    done = subprocess.run([sys.executable, "-c", WITH_MPI], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "MPI is not ended\n"), done.stderr


FAULTS = """
import sys
class Faults:
    def find_spec(name, path, target=None):
        if name == "ckdist.cli.main":
            raise KeyboardInterrupt
sys.meta_path[:0] = [Faults] * (sys.argv[1] == "interrupt")
from {0} import {1}
{1}()
"""


@pytest.mark.parametrize("fault, code, said", [("interrupt", 130, ""), ("library", 1, "cannot be loaded: ")])
def test_a_fault_of_the_imports_is_no_traceback(fault, code, said):
    start = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["ckdist"].split(":")
    words, env = [sys.executable, "-c", FAULTS.format(*start), fault], {**os.environ, "CKDIST_LIBRARY": __file__}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env)
    assert (done.returncode, done.stdout) == (code, "") and said in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == (fault == "library"), done.stderr

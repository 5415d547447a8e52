"""A process that ends without the interpreter's teardown, or before it has imported its command."""

import subprocess
import sys

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


INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(name, path, target=None):
        if name == "ckdist.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt)
from {0} import {1}
{1}()
"""


def test_an_interrupt_of_the_imports_is_no_traceback():
    words = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["ckdist"].split(":")
    code = INTERRUPTED.format(*words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

"""A process that ends without the interpreter's teardown."""

import subprocess
import sys

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

"""A program that is a fork of the tests' interpreter is what a start from nothing is."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support import warm_starts
from tests.support.launcher import environment

pytestmark = pytest.mark.skipif(bool(warm_starts.why_not()), reason=f"no forks: {warm_starts.why_not()}")
SHOWS = """
import json, os, signal, sys, threading
print("err", file=sys.stderr)
with open(f"/proc/{os.getpid()}/cmdline") as words, open("/proc/self/environ") as variables:
    shown = words.read().split("\\0")[1:-1], "ONLY_HERE=1" in variables.read().split("\\0")
json.dump({
    "argv": sys.argv, "first": sys.path[0], "name": __name__, "said": input(), "own": os.environ["ONLY_HERE"],
    "folder": os.getcwd(), "parent": os.getppid(), "leads": os.getsid(0) == os.getpid(), "shown": shown,
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1], "cpus": len(os.sched_getaffinity(0)),
    "thread": threading.get_native_id() == os.getpid(), "interrupts": signal.getsignal(signal.SIGINT).__name__,
    "masked": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))), "passed": os.read(PASSED, 9).decode(),
}, sys.stdout)
sys.exit(3)
"""


def shown(folder, name: str) -> dict:
    """The properties that a program started in `folder` prints of itself."""
    reading, writing = os.pipe()
    os.write(writing, b"by a pipe")
    os.close(writing)
    path = folder / name
    path.write_text(SHOWS.replace("PASSED", str(reading)))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        done = subprocess.run(
            [sys.executable, name, "a", "b c"], input="hello\n", capture_output=True, text=True, cwd=folder,
            env={**environment(), "ONLY_HERE": "1"}, pass_fds=(reading,), start_new_session=True, timeout=60,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(reading)
    assert (done.returncode, done.stderr) == (3, "err\n"), done.stderr
    return json.loads(done.stdout)


def test_a_fork_is_as_a_process_that_starts_from_nothing(tmp_path):
    warm = shown(tmp_path, "shows.py")
    with warm_starts.cold_starts():
        assert warm == shown(tmp_path, "shows.py")
    assert warm["parent"] == os.getpid() and warm["shown"] == [["shows.py", "a", "b c"], True]


def test_errors_and_signals_are_a_programs_own():
    starts = {"env": environment(), "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", "import ckdist\n1 / 0"], **starts) as failed:
        trace = failed.stderr.read()
    assert failed.wait() == 1 and trace.splitlines()[1:] == ['  File "<string>", line 2, in <module>', ZERO], trace
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **starts) as sleeps:
        sleeps.kill()
    assert sleeps.returncode == -signal.SIGKILL
    with pytest.raises(FileNotFoundError):
        subprocess.Popen([sys.executable, "-c", "0"], cwd="/no/such/folder", **starts)


ZERO = "ZeroDivisionError: division by zero"


def test_programs_that_read_another_environment_start_from_nothing():
    told = {"env": environment(), "capture_output": True, "text": True}
    code = "import sys; print('ckdist.cli.serve' in sys.modules)"
    loaded = lambda **more: subprocess.run([sys.executable, "-c", code], **{**told, **more}).stdout.strip()
    assert loaded() == "True"
    assert loaded(env={**environment(), "PYTHONHASHSEED": "1"}) == loaded(env=dict(os.environ)) == "False"
    assert loaded(preexec_fn=lambda: None) == "False"

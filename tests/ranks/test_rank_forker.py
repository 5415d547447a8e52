"""Ranks that a process forks are like those that are started."""

import json
import subprocess
import sys

import psutil

from ckdist.launcher.rank_forker import can_fork
from ckdist.python_words import module_words
from tests.support.launched import wait_ended
from tests.support.launcher import one_host

# Starts rank 1 of 2: forked, not forked, and after the death of the process that forks. Each waits for rank 0, whose
# end of the connection is here.
STARTS = """
import contextlib, json, os, pathlib, signal, socket, tempfile, time
from ckdist.comm.bootstrap.launched_world import describe
from ckdist.launcher.children import Children
from ckdist.launcher.job import Job
from ckdist.launcher.rank_forker import RankForker, RankStart
from ckdist.python_words import module_words

def links(place):
    found = {}
    for fd in place.joinpath("fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[int(fd.name)] = os.readlink(fd)
    return found

children, forker = Children(), RankForker()
job = Job(tuple(module_words("ckdist.cli.main", "generate", "-p", "x", "-t", "1")), 2, tempfile.gettempdir())
found = []
for forks in (True, False, True):
    own, other = socket.socketpair()
    os.dup2(other.fileno(), 20)
    environment = job.rank_environment(1, 0, 2, {0: 20})
    null = os.open(os.devnull, os.O_WRONLY)
    start = RankStart(environment, (-3, null, null), (20,), own_group=True)
    child = forker.start(children, job, print, start, forks=forks)
    os.close(null)
    own.recv(1)  # its world begins
    place = pathlib.Path("/proc", str(child.pid))
    read = lambda name: place.joinpath(name).read_bytes().decode().split(chr(0))
    status = dict(line.split(":", 1) for line in place.joinpath("status").read_text().splitlines())
    before = links(place)
    time.sleep(0.1)  # the rank opens files and closes them
    fds = {fd: to for fd, to in links(place).items() if before.get(fd) == to}
    variables = [v.partition(":")[0] for v in read("environ") if v]
    facts = {name: status[name].split() for name in ("PPid", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Threads")}
    facts |= {"words": read("cmdline"), "variables": sorted(variables), "folder": os.readlink(place / "cwd")}
    facts |= {"session": os.getsid(child.pid) == child.pid, "output": [fds[n] for n in range(3)]}
    facts |= {"connection": fds[20].partition(":")[0], "fds": sorted(fd for fd in fds if fd < 10 or fd >= 20)}
    found.append((child.pid, facts))
    if len(found) == 1:
        warm = pathlib.Path("/proc", str(forker._child.pid), "cmdline").read_text().strip(chr(0))
    elif len(found) == 2:
        forker._child.signal(signal.SIGKILL)
print(json.dumps((warm, found)), flush=True)
time.sleep(60)
"""


def test_a_forked_rank_is_like_a_started_one():
    words = [sys.executable, "-c", STARTS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=one_host(), text=True) as starter:
        try:
            name, ((forked, facts), *others) = json.loads(starter.stdout.readline())
            assert name == "ckdist, which forks ranks" and facts["PPid"] == [str(starter.pid)]
            assert [other[1] for other in others] == [facts, facts]
            processes = psutil.Process(starter.pid).children(recursive=True)
            assert forked in [process.pid for process in processes]
        finally:
            starter.kill()
    assert not wait_ended(processes, 20)


def test_only_commands_of_this_ckdist_are_forked():
    assert can_fork(module_words("ckdist.cli.main", "serve"))
    assert not any(map(can_fork, (["env", "ckdist", "serve"], ["bash", "-c", "ckdist serve"], ["/bin/ckdist"], ["x"])))

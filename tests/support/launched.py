"""Jobs under `ckdist launch`."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import psutil

from ckdist.ended_threads import end_soon
from tests.support.launcher import environment, one_host
from tests.support.paths import ROOT

LAUNCH = (sys.executable, "-m", "ckdist.cli.main", "launch")


def variables(words: Sequence[str]) -> dict[str, str]:
    """The environment of a job. One over several hosts chooses its layout by what it is not told."""
    return environment() if {"--hosts", "--hostfile"} & set(words) else one_host()


def launch(*words: str, timeout: float = 60, **more) -> subprocess.CompletedProcess:
    """`ckdist launch words...`, to its end."""
    env = {**variables(words), **more.pop("env", {})}
    return subprocess.run([*LAUNCH, *words], env=env, capture_output=True, text=True, timeout=timeout, cwd=ROOT, **more)


@contextlib.contextmanager
def launched(*words: str, before: Sequence[str] = (), **more) -> Iterator[subprocess.Popen]:
    """`before... ckdist launch words...` while the `with` lasts; its standard error goes with its output."""
    job = subprocess.Popen(
        [*before, *LAUNCH, *words],
        env={**variables(words), **more.pop("env", {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        **more,
    )
    try:
        yield job
    finally:
        job.kill()
        job.stdout.close()
        job.wait()


def ranks_of(job: subprocess.Popen) -> dict[int, psutil.Process]:
    """The processes that are the job's ranks on this host."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(job.pid).children(recursive=True):  # parents first
            with contextlib.suppress(psutil.Error, KeyError):
                found.setdefault(int(process.environ()["RANK"]), process)
    return found


def wait_ended(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that have not ended in time. A zombie has not while its parent, who should have waited for it, is this
    process or one of them; one that init has inherited has ended: init collects it when it will.
    """
    family = {os.getpid(), *(process.pid for process in processes)}

    def ended(process: psutil.Process) -> bool:
        end_soon(process.pid)
        try:
            return not process.is_running() or (
                process.status() == psutil.STATUS_ZOMBIE and process.ppid() not in family
            )
        except psutil.NoSuchProcess:
            return True

    end = time.monotonic() + seconds
    while (left := [p for p in processes if not ended(p)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left

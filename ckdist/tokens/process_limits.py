"""Limits of a process on its own CPU time, time, memory and files. The kernel kills a process that exceeds one.

Native code that loops holds no lock for which a Python thread could wait. So only the kernel can end it: by a signal
whose default action ends the process, or by refusing memory.
"""

import logging
import resource
import signal
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING, TextIO

from ckdist.prctl import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, prctl

UNLIMITED = resource.RLIM_INFINITY
MAX_FILES = 16
REMEDY = "it is broken or hostile: fetch the model's own"  # if a tokenizer exceeds its limits


@dataclass(frozen=True)
class Limits:
    """Limits of one task."""

    cpu: float  # seconds of CPU time
    memory: int  # bytes beyond those at the confinement

    @property
    def wall(self) -> float:
        """Seconds that the task may take on a busy machine."""
        return 10 * self.cpu


class Confinement:
    """Arms and disarms the limits of one task after another.

    Construct it while the process has its size without a task, or in the parent right before it is forked.

    Args:
        status: /proc/self/status, which a confined process cannot open.
    """

    def __init__(self, status: FileIO) -> None:
        self._used = {resource.RLIMIT_AS: 0, resource.RLIMIT_DATA: 0}
        status.seek(0)
        for line in status.read(1 << 16).decode("ascii", "replace").splitlines():
            for kind, name in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
                if line.startswith(name):
                    self._used[kind] = int(line.split()[1]) << 10

    def arm(self, limits: Limits) -> None:
        """Lets the kernel kill the process once it has used more than `limits`."""
        signal.setitimer(signal.ITIMER_PROF, limits.cpu)
        signal.setitimer(signal.ITIMER_REAL, limits.wall)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + limits.cpu) + 2)
        for kind, size in self._used.items():
            _lower(kind, size + limits.memory)

    def disarm(self) -> None:
        """Lifts the limits while the process waits, so that this time does not count."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind in (resource.RLIMIT_CPU, *self._used):
            _lower(kind, UNLIMITED)


def give_up_privileges() -> None:
    """Forbids growing files, core dumps, and inspection by other processes of the same user."""
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_FSIZE, 0)


# The standard library has the generic class from Python 3.11 on.
StreamHandler = logging.StreamHandler[TextIO] if TYPE_CHECKING else logging.StreamHandler


class LogHandler(StreamHandler):
    """Writes log lines even if standard error is a file, although no file may grow otherwise."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line."""
        _lower(resource.RLIMIT_FSIZE, UNLIMITED)
        try:
            super().emit(record)
        finally:
            _lower(resource.RLIMIT_FSIZE, 0)


def start_nothing() -> None:
    """Allows only MAX_FILES open files (Python imports modules late) and, except for root, no new process or thread."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _lower(kind: int, value: int) -> None:
    """Sets the soft limit, but not above the hard limit that the process was started with."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == UNLIMITED or 0 <= value < hard else hard, hard))

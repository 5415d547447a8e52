"""Limits of a process on itself that the kernel enforces: of CPU time, time, memory and files. Who exceeds one is
killed.

Native code that loops holds no lock that a Python thread could wait for, so only the kernel can end it: by a signal
whose default is to end the process, or by refusing memory.
"""

import logging
import resource
import signal
from dataclasses import dataclass
from io import FileIO
from typing import TextIO

from ckdist.prctl import PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, prctl

UNLIMITED = resource.RLIM_INFINITY
MAX_FILES = 16


@dataclass(frozen=True)
class Limits:
    """For one task: `cpu` seconds of CPU time, and `memory` bytes beyond those that the process had when it was
    confined.
    """

    cpu: float
    memory: int

    @property
    def wall(self) -> float:
        """Seconds that the task may take on a machine that has much other work too."""
        return 10 * self.cpu


class Confinement:
    """Arms and disarms the limits of one task after the other. Made when the process is as large as it is without a
    task, or by its parent right before it is forked.
    """

    def __init__(self, status: FileIO) -> None:
        """`status`: /proc/self/status, which a confined process cannot open."""
        self._used = {resource.RLIMIT_AS: 0, resource.RLIMIT_DATA: 0}
        status.seek(0)
        for line in status.read(1 << 16).decode("ascii", "replace").splitlines():
            for kind, name in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
                if line.startswith(name):
                    self._used[kind] = int(line.split()[1]) << 10

    def arm(self, limits: Limits) -> None:
        """From now on the process is killed once it has used more than `limits`."""
        signal.setitimer(signal.ITIMER_PROF, limits.cpu)
        signal.setitimer(signal.ITIMER_REAL, limits.wall)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + limits.cpu) + 2)
        for kind, size in self._used.items():
            _lower(kind, size + limits.memory)

    def disarm(self) -> None:
        """The process waits: time does not count."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for kind in (resource.RLIMIT_CPU, *self._used):
            _lower(kind, UNLIMITED)


def give_up_privileges() -> None:
    """No file can grow, nothing dumps core, and nobody of the same user can look into this process."""
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_FSIZE, 0)


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes lines where standard error is a file too, which must not grow otherwise."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line."""
        _lower(resource.RLIMIT_FSIZE, UNLIMITED)
        try:
            super().emit(record)
        finally:
            _lower(resource.RLIMIT_FSIZE, 0)


def start_nothing() -> None:
    """A few files may be open (Python imports modules late) and, but for root, no process or thread can be started."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _lower(kind: int, value: int) -> None:
    """The soft limit; what the process was started with stays the most."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == UNLIMITED or 0 <= value < hard else hard, hard))

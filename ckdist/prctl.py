"""What a process asks of the kernel about its own end and that of its children."""

import ctypes
import os
import signal
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

_library = ctypes.CDLL(None, use_errno=True)
prctl = _library.prctl


def kernel_call(number: int, *arguments: Any) -> tuple[int, int]:
    """The result of a system call that the C library has no name for, and errno if it failed, else 0."""
    _library.syscall.restype = ctypes.c_long
    result = _library.syscall(
        ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    )
    return result, ctypes.get_errno() if result < 0 else 0


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """This process gets a signal when the thread that started it ends; it must have started it as process `parent`."""
    prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """What children of this process leave behind becomes its own child, so that it can be ended and waited for."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

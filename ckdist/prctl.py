"""Kernel calls about the end of this process and of its children."""

import ctypes
import os
import signal
from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38

_library = ctypes.CDLL(None, use_errno=True)
prctl = _library.prctl


def kernel_call(number: int, *arguments: Any) -> tuple[int, int]:
    """Makes a system call that the C library has no name for. Returns its result, and errno or 0."""
    _library.syscall.restype = ctypes.c_long
    result = _library.syscall(
        ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    )
    return result, ctypes.get_errno() if result < 0 else 0


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Sends this process a signal when the thread that started it ends.

    Args:
        parent: The process that started this one. If that has ended already, this one ends now.
        number: The signal.
    """
    prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Makes orphans of this process's children its own children, so that it can end them and wait for them."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

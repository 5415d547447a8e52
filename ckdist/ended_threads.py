"""The threads of a process that ends."""

import os


def end_soon(pid: int) -> None:
    """Gives the threads of a killed process that has not ended yet normal priority, if this user may.

    Call this while the process cannot be waited for.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            if file.read().rpartition(b")")[2].split(None, 1)[0] != b"Z":
                return
    except OSError:
        return
    raise_priorities(pid)


def raise_priorities(pid: int) -> None:
    """Gives the threads of a process normal priority, if this user may.

    A process ends with its last thread, and its memory is free only then. On a busy host, a thread under SCHED_IDLE can
    wait for many seconds until it may end.
    """
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208, names alone
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
    except OSError:
        pass

"""The end of a process whose work is done."""

import atexit
import contextlib
import os
import sys
import threading


def end_process(code: int) -> None:
    """Ends this process without the interpreter's teardown, which takes a sixth of a short command's CPU time.

    Functions of `atexit` run. Returns if the teardown is needed: it ends MPI if `MpiWorld.close` has not, waits for
    threads and writes the counts of coverage.
    """
    works = any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    mpi = sys.modules.get("mpi4py.MPI")
    if works or (mpi and not mpi.Is_finalized()) or "coverage" in sys.modules:
        return
    atexit._run_exitfuncs()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - there is no public name
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None under a daemon
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)

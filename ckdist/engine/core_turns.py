"""Turns of engines on the same cores: one engine at a time runs a step, and each gets an equal share of the seconds.

Start-time fair queueing (Goyal et al., 1996). An engine's step has a start tag, the larger of its last step's end tag
and the tag of the step that runs. The end tag is the start tag plus the step's seconds. The smallest start tag runs.
"""

import contextlib
import fcntl
import math
import mmap
import os
import time

ROW = 3  # float64 values of an engine: its tag, the time until which it wants a turn, its process id
POLL_SECONDS = 5e-5
LINGER_SECONDS = 5e-3  # an engine that comes back within this time is waited for if it is behind by
SLACK_SECONDS = 1e-2


def turns_bytes(engines: int) -> int:
    """Returns the size of the file: the tag of the step that runs, and a row for each engine."""
    return 8 * (1 + ROW * engines)


class CoreTurns(contextlib.AbstractContextManager[None]):
    """A turn is a lock on a file, which the kernel frees if its holder dies. The file's content decides who is next.

    Args:
        path: A file of `turns_bytes`, initially zero, that all engines open.
        engine: This engine's number among them.
    """

    def __init__(self, path: str, engine: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._rows = memoryview(mmap.mmap(self._file, os.fstat(self._file).st_size)).cast("d")
        self._row = 1 + ROW * engine
        self._begin = self._end = 0.0  # tags
        self._entered = 0.0
        self._want(0.0, 0.0)
        self._rows[self._row + 2] = os.getpid()

    def __enter__(self) -> None:
        self._begin = max(self._end, self._rows[0])
        self._want(self._begin, math.inf)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        while self._is_ahead():
            fcntl.flock(self._file, fcntl.LOCK_UN)
            time.sleep(POLL_SECONDS)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._rows[0] = max(self._rows[0], self._begin)
        self._entered = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self._end = self._begin + now - self._entered
        self._want(self._end + SLACK_SECONDS, now + LINGER_SECONDS)
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def _want(self, tag: float, until: float) -> None:
        self._rows[self._row] = tag
        self._rows[self._row + 1] = until

    def _is_ahead(self) -> bool:
        """Returns True if another engine that waits for a turn has a smaller tag."""
        rows, now = self._rows, time.monotonic()
        return any(
            rows[row] < self._begin and rows[row + 1] > now and row != self._row and _lives(int(rows[row + 2]))
            for row in range(1, len(rows), ROW)
        )


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True

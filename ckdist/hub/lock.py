"""A lock that one process of a host has at a time, by a file that stays."""

import contextlib
import errno
import fcntl
import logging
import pathlib
import time
from collections.abc import Iterator

from ckdist.errors import FetchError

log = logging.getLogger(__name__)

LOCK_SECONDS = 3600.0  # another process may be fetching over a slow line
POLL_SECONDS = 0.1


@contextlib.contextmanager
def file_lock(path: pathlib.Path, waiting: str | None = None) -> Iterator[None]:
    """Within, no other process has `path` locked. `waiting`: a line that is logged where one has it now.

    FetchError where another process holds it for too long, OSError where the file cannot be written.
    """
    deadline, told = time.monotonic() + LOCK_SECONDS, waiting is None
    with open(path, "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            if time.monotonic() > deadline:
                minutes = LOCK_SECONDS / 60
                raise FetchError(f"another process has held {path} for {minutes:.0f} min: end it, and try again")
            if not told:
                told = True
                log.info("%s", waiting)
            time.sleep(POLL_SECONDS)
        yield

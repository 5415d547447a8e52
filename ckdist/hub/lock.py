"""A lock between the processes of a host, on a file that is never removed."""

import contextlib
import errno
import fcntl
import logging
import pathlib
import time
from collections.abc import Iterator

from ckdist.errors import FetchError

log = logging.getLogger(__name__)

LOCK_SECONDS = 3600.0  # long: another process may be fetching over a slow connection
POLL_SECONDS = 0.1


@contextlib.contextmanager
def file_lock(path: pathlib.Path, waiting: str | None = None) -> Iterator[None]:
    """Holds an exclusive lock on `path` within the block.

    Args:
        waiting: A line to log if another process holds the lock.

    Raises:
        FetchError: Another process holds the lock for too long.
        OSError: The file cannot be written.
    """
    deadline, logged = time.monotonic() + LOCK_SECONDS, waiting is None
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
            if not logged:
                logged = True
                log.info("%s", waiting)
            time.sleep(POLL_SECONDS)
        yield

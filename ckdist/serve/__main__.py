"""`python -m ckdist.serve`: the HTTP process, as rank 0 starts it; its settings come as JSON on standard input."""

import asyncio
import contextlib
import gc
import os
import pathlib
import socket
import sys

from ckdist.serve.request_log import start_logging
from ckdist.serve.server import HttpServer
from ckdist.serve.settings import HttpSettings

MAX_SETTINGS_BYTES = 1 << 20


def main() -> int:
    """Runs the HTTP process; its exit code (see `HttpServer`)."""
    settings = HttpSettings.from_json(sys.stdin.buffer.read(MAX_SETTINGS_BYTES))
    start_logging(settings)
    with contextlib.suppress(AttributeError, OSError):
        # Rank 0 is bound to its own cores, where its compute threads run; this process goes where there is room.
        os.sched_setaffinity(0, settings.cpus)
    gc.collect()
    gc.freeze()  # what was imported stays: a collection that looks at it stops the event loop for 50 ms
    try:
        return asyncio.run(HttpServer(settings, socket.socket(fileno=settings.listener)).run())
    finally:
        if os.getppid() != settings.parent:
            remove_endpoint(settings.endpoint)


def remove_endpoint(endpoint: str) -> None:
    """The socket of a rank 0 that was killed, as by a launcher's Ctrl-C, and the folder in which nothing else was."""
    path = pathlib.Path(endpoint.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        path.parent.rmdir()


sys.exit(main())

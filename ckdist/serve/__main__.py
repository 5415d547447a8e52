"""`python -m ckdist.serve`: the HTTP process. Rank 0 starts it and sends its settings as JSON on standard input."""

import asyncio
import contextlib
import gc
import os
import pathlib
import socket
import sys

from ckdist.process_end import end_process
from ckdist.serve.request_log import start_logging
from ckdist.serve.server import HttpServer
from ckdist.serve.settings import HttpSettings

MAX_SETTINGS_BYTES = 16 << 20  # a thousand models


def main() -> int:
    """Runs the HTTP process and returns its exit code (see `HttpServer`)."""
    settings = HttpSettings.from_json(sys.stdin.buffer.read(MAX_SETTINGS_BYTES))
    start_logging(settings)
    with contextlib.suppress(AttributeError, OSError):
        # Rank 0 is bound to the cores of its compute threads. This process may run on any CPU of the job.
        os.sched_setaffinity(0, settings.cpus)
    gc.collect()
    gc.freeze()  # collections skip the imported modules: to scan them stops the event loop for 50 ms
    listener = socket.socket(fileno=settings.listener)
    if settings.models:
        from ckdist.serve.router_server import RouterServer

        return asyncio.run(RouterServer(settings, listener).run())
    try:
        return asyncio.run(HttpServer(settings, listener).run())
    finally:
        if os.getppid() != settings.parent:
            remove_endpoint(settings.endpoint)


def remove_endpoint(endpoint: str) -> None:
    """Removes the socket of a rank 0 that was killed, as by a launcher's Ctrl-C, and its folder if that is empty."""
    path = pathlib.Path(endpoint.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        path.parent.rmdir()


code = main()
end_process(code)
sys.exit(code)

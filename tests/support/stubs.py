"""Programs that shells start, as forks that this process starts (`tests/support/warm_starts.py`).

A shell starts `tests/support/programs/stub.py`, whose words, folder, environment, streams and signals the fork gets.
A fork ends with its stub.
"""

import contextlib
import marshal
import os
import pathlib
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

from tests.support.paths import ROOT

STUB = ROOT / "tests/support/programs/stub.py"
MAX_REQUEST = 1 << 17


@contextlib.contextmanager
def stubs() -> Iterator[list[str]]:
    """The words to which those of a program are added, while the `with` lasts."""
    with (
        tempfile.TemporaryDirectory(prefix="ckdist-stubs-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        path = str(pathlib.Path(folder, "socket"))
        listener.bind(path)
        listener.listen()
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield [sys.executable, "-ISE", str(STUB), path]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def accept(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=run, args=(listener.accept()[0],), daemon=True).start()


def run(connection: socket.socket) -> None:
    """Runs the program of one stub."""
    with connection, selectors.DefaultSelector() as selector:
        data, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3, socket.MSG_CMSG_CLOEXEC)
        words, folder, environment = marshal.loads(data)
        with subprocess.Popen(
            words, cwd=folder, env=environment, stdin=streams[0], stdout=streams[1], stderr=streams[2]
        ) as program:
            for stream in streams:
                os.close(stream)
            end = os.pidfd_open(program.pid)
            selector.register(end, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while program.poll() is None:
                for key, _ in selector.select():
                    if key.fileobj is connection:
                        number = connection.recv(16)
                        program.send_signal(int(number or b"9"))
            os.close(end)
        with contextlib.suppress(OSError):
            connection.send(b"%d" % program.returncode)

"""Programs that shells start, as forks that this process starts (`tests/support/warm_starts.py`).

A shell, or mpirun, starts `tests/support/programs/stub.py`. The fork gets its words, folder, environment, streams,
signals and namespaces. A fork ends with its stub.
"""

import contextlib
import ctypes
import functools
import marshal
import os
import pathlib
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

from ckdist.ended_threads import end_soon
from tests.support.paths import ROOT

STUB = ROOT / "tests/support/programs/stub.py"
MAX_REQUEST = 1 << 17
NAMESPACES = ("net", "uts", "mnt")  # of a host of tests/support/hosts.py


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


def namespaces(connection: socket.socket) -> list[int]:
    """Descriptors of the stub's namespaces; none if they are those of this process."""
    pid, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    own, theirs = ([f"/proc/{process}/ns/{name}" for name in NAMESPACES] for process in ("self", pid))
    same = [os.readlink(path) for path in own] == [os.readlink(path) for path in theirs]
    return [] if same else [os.open(path, os.O_RDONLY) for path in theirs]


def enter(folder: str, descriptors: list[int]) -> None:
    """Moves this process into namespaces, and back into its folder: a mount namespace is entered at its root."""
    for descriptor in descriptors:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    os.chdir(folder)


def run(connection: socket.socket) -> None:
    """Runs the program of one stub."""
    with connection, selectors.DefaultSelector() as selector:
        data, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3, socket.MSG_CMSG_CLOEXEC)
        words, folder, environment = marshal.loads(data)
        if words[0] == "env":  # as the launcher starts agents
            while "=" in (words := words[1:])[0]:
                environment.update([words[0].split("=", 1)])
        given = {"stdin": streams[0], "stdout": streams[1], "stderr": streams[2]}
        if places := namespaces(connection):
            given |= {"pass_fds": places, "preexec_fn": functools.partial(enter, folder, places)}
        with subprocess.Popen(words, cwd=folder, env=environment, **given) as program:
            for number in (*streams, *places):
                os.close(number)
            end = os.pidfd_open(program.pid)
            selector.register(end, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while program.poll() is None:
                end_soon(program.pid)
                for key, _ in selector.select(0.5):
                    if key.fileobj is connection:
                        number = connection.recv(16)
                        program.send_signal(int(number or b"9"))
            os.close(end)
        with contextlib.suppress(OSError):
            connection.send(b"%d" % program.returncode)

"""The private folder of the engine's socket. It is removed with its server, or by the next one."""

import contextlib
import errno
import os
import pathlib
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator

PREFIX = "ckdist-"
SOCKET = "engine"
OWNER = "owner"  # a socket with a listener as long as the process that made the folder lives
# The environment of an engine without an HTTP process of its own (`ckdist.serve.engine_job` sets it):
DIRECTORY = "CKDIST_ENGINE_DIRECTORY"  # the private folder of its socket
PARENT = "CKDIST_ENGINE_PARENT"  # the process that it ends with
TURNS = "CKDIST_ENGINE_TURNS"  # FILE:NUMBER of `CoreTurns`, if engines share cores
READY = "ready: "  # before the last line of its output at its start, which is the path under /v1 to try it with
LOST = "lost: "  # before the reason of its ranks' end; their launcher then waits for an answer on its standard input
CONNECT_SECONDS = 0.2


def socket_address(directory: str) -> str:
    """The ZeroMQ address of the engine's socket in `directory`."""
    return f"ipc://{pathlib.Path(directory, SOCKET)}"


@contextlib.contextmanager
def socket_directory() -> Iterator[str]:
    """Makes a folder that only this user may enter, and removes it at the end."""
    remove_dead(pathlib.Path(tempfile.gettempdir()))
    directory = tempfile.mkdtemp(prefix=PREFIX)
    try:
        with socket.socket(socket.AF_UNIX) as owner:  # between two engines, another server would remove the folder
            owner.bind(f"{directory}/{OWNER}")
            owner.listen()
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_dead(parent: pathlib.Path) -> None:
    """Removes this user's folders in `parent` that hold nothing but sockets without a listener."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            info = folder.lstat()
            if (
                stat.S_ISDIR(info.st_mode)
                and info.st_uid == os.geteuid()
                and (entries := list(folder.iterdir()))
                and all(entry.name in (SOCKET, OWNER) and _is_dead(entry) for entry in entries)
            ):
                for entry in entries:
                    entry.unlink()
                folder.rmdir()


def _is_dead(path: pathlib.Path) -> bool:
    """True if `path` is a socket without a listener."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_SECONDS)
        return probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED

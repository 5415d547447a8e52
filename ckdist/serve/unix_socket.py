"""Listening on a Unix socket."""

import os
import socket
import stat

from ckdist.errors import ConfigError
from ckdist.serve.settings import BACKLOG


def listen_unix(path: str) -> socket.socket:
    """Listens on a Unix socket that only this user can open. A socket that nobody listens on is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode) and not _answers(path):
            os.unlink(path)  # noqa: PTH108 - a plain path
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
    except (OSError, ValueError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on unix:{path}: {getattr(error, 'strerror', None) or error}") from None
    return listener


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return False
        return True

"""The addresses that a server listens on: TCP ports and Unix sockets, with or without TLS."""

import contextlib
import ipaddress
import os
import pathlib
import socket
import stat

from ckdist.errors import ConfigError
from ckdist.serve.settings import BACKLOG

UNIX = "unix:"
MAX_ADDRESSES = 16


def listen(host: str, port: int, flag: str = "--port", alone: bool = True) -> socket.socket:
    """Returns a listening socket. Call this before slow work, so that a port in use is reported at once.

    `flag` names the port in messages. An IPv6 address `alone` takes IPv4, too. Raises ConfigError if that cannot be.
    """
    if host.startswith(UNIX):
        return listen_unix(host.removeprefix(UNIX))
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host ({host}) is not known: {getattr(error, 'strerror', error)}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not alone)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = f"cannot listen on {host} port {port}: {error.strerror}"
        raise ConfigError(f"{why}; choose another --host or {flag}") from None
    return listener


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


def listen_all(hosts: str, port: int) -> list[socket.socket]:
    """Listens on all addresses in a text with commas. With port 0, all have the port of the first one.

    Raises ConfigError as `listen` does, or if an address is given twice.
    """
    names = [name.strip() for name in hosts.split(",")]
    if len(set(names)) < len(names) or len(names) > MAX_ADDRESSES:
        raise ConfigError(f"--host ({hosts}) must be at most {MAX_ADDRESSES} different addresses")
    listeners: list[socket.socket] = []
    try:
        for name in names:
            listeners.append(listen(name, port, alone=len(names) == 1))
            if listeners[-1].family != socket.AF_UNIX:
                port = listeners[-1].getsockname()[1]
    except ConfigError:
        for listener in listeners:
            close(listener)
        raise
    return listeners


def is_local(listener: socket.socket) -> bool:
    """True if only this machine's users reach the socket."""
    if listener.family == socket.AF_UNIX:
        return True
    try:
        return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
    except ValueError:
        return False


def url_of(listener: socket.socket, secure: bool = False) -> str:
    """Returns the URL of a listening socket; for a Unix socket its path after `unix:`."""
    if listener.family == socket.AF_UNIX:
        return UNIX + listener.getsockname()
    host, port = listener.getsockname()[:2]
    return f"http{'s' * secure}://{f'[{host}]' if ':' in host else host}:{port}"


def close(listener: socket.socket) -> None:
    """Closes a listening socket, and removes the file of a Unix socket."""
    with contextlib.suppress(OSError):
        if listener.family == socket.AF_UNIX:
            pathlib.Path(listener.getsockname()).unlink()
    listener.close()


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Checks the certificate of --ssl-certfile before anything is loaded.

    Raises ConfigError unless both files are there and belong together, or none is given.
    """
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        missing = "--ssl-certfile" if certificate is None else "--ssl-keyfile"
        raise ConfigError(f"TLS needs a certificate and its key: {missing} is missing")
    import ssl  # few servers need it

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"--ssl-certfile {certificate} with --ssl-keyfile {key} cannot be used: {reason}") from None

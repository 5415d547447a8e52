"""TCP ports for what a test starts."""

import itertools
import os
import pathlib
import socket

_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")  # what the system gives to connections
_PAIRS = 400  # to one worker of pytest


def worker() -> int:
    """The number of this worker of pytest-xdist; 0 without it."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


_steps = itertools.count(os.getpid())


def free_port() -> int:
    """A port of loopback that nothing listens at, nor at the next one: below those that connections are given, so it
    stays free until it is used, and of this worker alone.
    """
    end = int(_RANGE.read_text().split()[0]) - 2 * _PAIRS * worker()
    for step in itertools.islice(_steps, _PAIRS):
        port = end - 2 * (1 + step % _PAIRS)
        try:
            for beside in (port, port + 1):
                socket.create_server(("127.0.0.1", beside)).close()
        except OSError:
            continue
        return port
    raise AssertionError(f"no two ports beside each other are free from {end - 2 * _PAIRS} to {end - 1}")

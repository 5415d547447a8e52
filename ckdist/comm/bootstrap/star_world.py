"""Small messages at start-up between ranks that have one connection each to rank 0.

Subclasses make the connections (`tcp_world`, `launched_world`). Messages are msgpack with a size limit (`connection`);
the traffic of every step uses other connections. Ranks share a host if its boot id is the same.
"""

import contextlib
import os
import time
from collections.abc import Collection
from typing import Any

import msgpack

from ckdist.comm.bootstrap.connection import BootstrapConnection, receive
from ckdist.comm.host_name import host_name
from ckdist.errors import CommError, ConfigError

# Longest wait for the next message of a rank that sends heartbeats: it may load a large model from a slow disk.
LOAD_SECONDS = 3600.0

START_SECONDS = 120.0  # until all ranks have connected
TIMEOUT_VARIABLE = "CKDIST_START_TIMEOUT"


def start_seconds() -> float:
    """Longest wait of ranks for each other at start-up. Raises ConfigError if the variable is not a number."""
    text = os.environ.get(TIMEOUT_VARIABLE) or str(START_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ConfigError(f"{TIMEOUT_VARIABLE} ({text!r}) must be a number of seconds")
    return seconds


def packed(value: Any) -> bytes:
    """`value` as msgpack."""
    data = msgpack.packb(value)
    assert data is not None  # a Packer with autoreset returns bytes
    return data


class StarWorld:
    """A World over connections that a subclass makes.

    Args:
        secret: The job's common secret, or None if the connections themselves are trusted.
        encrypt: `--encrypt`.
    """

    def __init__(self, rank: int, size: int, secret: bytes | None, encrypt: str = "auto") -> None:
        self.rank, self.size, self.secret, self.encrypt = rank, size, secret, encrypt
        self._connections: dict[int, BootstrapConnection] = {}

    def find_hosts(self, host: str | None = None) -> None:
        """Finds the ranks that share a host. A collective call. `host` replaces this machine's name."""
        self.hosts = tuple(self.gather(host or host_name()))
        same = [r for r, name in enumerate(self.hosts) if name == self.hosts[self.rank]]
        self.local_rank, self.local_size = same.index(self.rank), len(same)

    def broadcast(self, value: Any = None) -> Any:
        """Returns rank 0's msgpack-able value on every rank."""
        if self.rank == 0:
            for peer in self._connections:
                self._send(peer, value)
            return value
        return self._receive([0])[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns every rank's msgpack-able value, in rank order, on every rank."""
        if self.rank == 0:
            values = [value, *self._receive(range(1, self.size))]
            self.broadcast(values)
            return values
        self._send(0, value)
        (values,) = self._receive([0])
        if not isinstance(values, list) or len(values) != self.size:
            raise CommError(
                f"rank 0 sent something other than the values of {self.size} ranks: "
                "start all ranks with the same version"
            )
        return values

    def collect(self, value: Any, seconds: float) -> list[Any] | None:
        """Returns every rank's value on rank 0, or None for a rank later than `seconds`. Other ranks get None."""
        if self.rank:
            with contextlib.suppress(CommError):
                self._send(0, value)
            return None
        deadline, values = time.monotonic() + seconds, [value]
        for peer in range(1, self.size):
            try:
                (data,) = receive({peer: self._connections[peer]}, max(0.0, deadline - time.monotonic()))
                values.append(msgpack.unpackb(data))
            except (CommError, ValueError, msgpack.UnpackException):
                values.append(None)
        return values

    def close(self) -> None:
        """Ends the connections to the other ranks."""
        for connection in self._connections.values():
            connection.close()

    def _send(self, peer: int, value: Any) -> None:
        try:
            self._connections[peer].send(packed(value))
        except OSError as error:
            raise CommError(f"rank {peer} was lost at start-up: {error}") from None

    def _receive(self, peers: Collection[int], seconds: float = LOAD_SECONDS) -> list[Any]:
        """Receives the next value of each peer. If one is lost, rank 0 sends the error to all others."""
        try:
            return [
                msgpack.unpackb(data, strict_map_key=False)
                for data in receive({peer: self._connections[peer] for peer in peers}, seconds)
            ]
        except (ValueError, TypeError, msgpack.UnpackException):  # TypeError: a list as a key
            error = CommError(
                f"one of ranks {', '.join(map(str, peers))} sent something that is not msgpack at start-up"
            )
        except CommError as problem:
            error = problem
        for connection in self._connections.values() if self.rank == 0 else ():
            with contextlib.suppress(OSError):
                connection.send(str(error).encode(), last=True)
        raise error

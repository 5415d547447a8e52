"""A job's ranks that have one connection each to rank 0: what they send each other at start-up.

How these connections came about is another file's affair (`tcp_world`, `launched_world`). What is exchanged here is
small msgpack with capped sizes (`connection`); the traffic of every step goes elsewhere. Who shares a host is found out
by the host's boot.
"""

import contextlib
import time
from collections.abc import Collection
from typing import Any

import msgpack

from ckdist.comm.bootstrap.connection import BootstrapConnection, receive
from ckdist.comm.host_name import host_name
from ckdist.errors import CommError

# until a rank that has come, and shows that it lives, says the next thing: it may load a large model from a slow disk
# meanwhile
LOAD_SECONDS = 3600.0


def packed(value: Any) -> bytes:
    """`value` as msgpack."""
    data = msgpack.packb(value)
    assert data is not None  # as with every Packer that flushes itself
    return data


class StarWorld:
    """The interface of a World over connections that a subclass makes."""

    def __init__(self, rank: int, size: int, secret: bytes | None) -> None:
        """`secret`: what the ranks were given in common; None where the connections themselves are trusted."""
        self.rank, self.size, self.secret = rank, size, secret
        self._connections: dict[int, BootstrapConnection] = {}

    def find_hosts(self, host: str | None = None) -> None:
        """Learns who shares a host. A collective call. `host`: this rank's, where it is not the machine's name."""
        self.hosts = tuple(self.gather(host or host_name()))
        same = [r for r, name in enumerate(self.hosts) if name == self.hosts[self.rank]]
        self.local_rank, self.local_size = same.index(self.rank), len(same)

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's msgpack-able value, on every rank."""
        if self.rank == 0:
            for peer in self._connections:
                self._send(peer, value)
            return value
        return self._receive([0])[0]

    def gather_all(self, value: Any) -> list[Any]:
        """Every rank's msgpack-able value, on every rank, in rank order."""
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

    gather = gather_all

    def collect(self, value: Any, seconds: float) -> list[Any] | None:
        """On rank 0 every rank's msgpack-able value, None for a rank whose has not come within `seconds`; others get
        nothing.
        """
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
        """Sends a msgpack-able value; CommError where the peer is lost."""
        try:
            self._connections[peer].send(packed(value))
        except OSError as error:
            raise CommError(f"rank {peer} was lost at start-up: {error}") from None

    def _receive(self, peers: Collection[int], seconds: float = LOAD_SECONDS) -> list[Any]:
        """The next value of each. When one is lost, rank 0 tells those who wait for it."""
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

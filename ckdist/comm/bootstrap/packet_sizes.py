"""Checks that large packets pass between hosts.

A wrong MTU on the way drops only these. Handshakes and heartbeats pass, and a job would hang at its first step.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckdist.comm.host_name import machine_name
from ckdist.comm.world_protocol import World
from ckdist.errors import CommError

SMALL, LARGE, LARGEST = 64, 16 << 10, 256 << 10  # bytes; LARGEST only between the first ranks of two hosts
QUIET_SECONDS = 6.0  # without progress after the small message; TCP has retransmitted four times by then
_ZEROS = bytes(LARGEST)


@dataclass
class _Probe:
    """The bytes that one end still has to send and to receive. Both ends send the same number."""

    peer: int
    connection: socket.socket
    size: int
    sent: int = 0
    received: int = 0
    heard: float = 0.0

    def send(self) -> None:
        """Sends the small message on its own: the connection has TCP_NODELAY."""
        end = SMALL if self.sent < SMALL else self.size
        self.sent += self.connection.send(_ZEROS[: end - self.sent])

    def receive(self) -> None:
        """Reads no further than the probe: later bytes belong to the transport."""
        data = self.connection.recv(self.size - self.received)
        if not data:
            raise CommError(f"rank {self.peer} closed its connection")
        self.received += len(data)
        self.heard = time.monotonic()

    def wanted(self) -> int:
        """The selector's events that it waits for; 0 once it is done."""
        write = selectors.EVENT_WRITE if self.sent < self.size else 0
        return write | (selectors.EVENT_READ if self.received < self.size else 0)


def check_packet_sizes(world: World, connections: Mapping[int, socket.socket], seconds: float) -> None:
    """Exchanges messages larger than a packet with every rank of another host.

    Args:
        world: The ranks, by host.
        connections: This rank's connection to each peer. They block again afterwards.
        seconds: Time limit.

    Raises:
        CommError: A peer's small messages arrive and its large ones do not, or the peer is gone.
    """
    probes = list(_probes(world, connections))
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for probe in probes:
            probe.connection.setblocking(False)
            stack.callback(probe.connection.setblocking, True)
            selector.register(probe.connection, probe.wanted(), probe)
        while selector.get_map():
            for key, events in selector.select(0.1):
                _advance(selector, key.data, events)
            for key in selector.get_map().values():
                _check_time(world, key.data, deadline)


def _probes(world: World, connections: Mapping[int, socket.socket]) -> Iterator[_Probe]:
    for peer, connection in connections.items():
        if world.hosts[peer] == world.hosts[world.rank]:
            continue
        first = all(world.hosts.index(world.hosts[r]) == r for r in (peer, world.rank))
        yield _Probe(peer, connection, LARGEST if first else LARGE)


def _advance(selector: selectors.BaseSelector, probe: _Probe, events: int) -> None:
    try:
        with contextlib.suppress(BlockingIOError):
            if events & selectors.EVENT_WRITE:
                probe.send()
        with contextlib.suppress(BlockingIOError):
            if events & selectors.EVENT_READ:
                probe.receive()
    except OSError as error:
        raise CommError(f"the connection to rank {probe.peer} broke: {error.strerror}") from None
    if wanted := probe.wanted():
        selector.modify(probe.connection, wanted, probe)
    else:
        selector.unregister(probe.connection)


def _check_time(world: World, probe: _Probe, deadline: float) -> None:
    now = time.monotonic()
    if now > deadline:
        raise CommError(f"rank {probe.peer} did not exchange {probe.size >> 10} KiB over its connection in time")
    if not SMALL <= probe.received < probe.size or now - probe.heard < QUIET_SECONDS:
        return
    own, other = probe.connection.getsockname()[0], probe.connection.getpeername()[0]
    raise CommError(
        f"small messages from rank {probe.peer} ({machine_name(world.hosts[probe.peer])}, {other}) reach rank "
        f"{world.rank} ({machine_name(world.hosts[world.rank])}, {own}), and one of {probe.size >> 10} KiB does not: "
        f"check that the MTU is the same on both hosts and on all switches between them (`ip link`; "
        f"`ping -M do -s 1472 {own}` on {machine_name(world.hosts[probe.peer])})"
    )

"""Authenticated TCP connections between every two ranks. The native transport takes them over."""

import ipaddress
import itertools
import socket as sockets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ckdist.comm.bootstrap.handshake import Joined, Listener, Purpose, connect, job_secret
from ckdist.comm.bootstrap.packet_sizes import check_packet_sizes
from ckdist.comm.bootstrap.tcp_world import INTERFACE_VARIABLE, address_of
from ckdist.comm.world_protocol import Log, World
from ckdist.errors import CommError, ConfigError

DATA, HEARTBEATS = b"data", b"beat"  # what a connection carries
# All ranks have started and reach this point soon. The timeout of later steps does not matter here.
CONNECT_SECONDS = 30.0


class Connections(NamedTuple):
    """This rank's connections of one kind: file descriptors, -1 for itself, and all keys, or b"" if not encrypted."""

    descriptors: list[int]
    keys: bytes


def connect_ranks(
    world: World,
    interface: str | None,
    kinds: Sequence[bytes],
    log: Log | None = None,
    seconds: float = CONNECT_SECONDS,
    keep: Callable[[Listener, list[Any]], None] | None = None,
) -> list[Connections]:
    """Connects every two ranks. Traffic between hosts is sealed unless `world.encrypt` is "never". A collective call.

    Args:
        world: The ranks.
        interface: Name or address to listen at. Default: the address that reached the master, else `common_address`.
        kinds: The connections between two ranks: HEARTBEATS, and DATA unless another transport carries it.
        log: Receives lines about connections that were dropped.
        seconds: Time limit.
        keep: If there are several hosts, receives this rank's listener, still open, and the addresses of all.

    Returns:
        The connections for each of `kinds`.

    Raises:
        ConfigError: A rank cannot listen. Every rank raises it.
        CommError: A rank is missing, or large messages do not pass between hosts (`packet_sizes`).
    """
    secret = job_secret(world)
    reached = getattr(world, "address", None)  # that the master used
    found = reached if interface or reached is not None else common_address(world)
    listener, address, problem = None, "", ""
    connections: dict[tuple[bytes, int], Joined] = {}
    sealed = seals(world)
    try:
        address = address_of(interface) if interface else str(found)
        listener = Listener(address, 0, world.rank, secret, log=log, sealed=sealed)
    except ConfigError as error:
        problem = str(error)
    try:
        listening = world.gather(list(listener.address) if listener else problem)
        if refused := [(rank, text) for rank, text in enumerate(listening) if isinstance(text, str)]:
            raise ConfigError(f"rank {refused[0][0]}: {refused[0][1]}")
        assert listener is not None  # otherwise this rank is among the refused
        deadline = time.monotonic() + seconds
        for peer, kind in itertools.product(range(world.rank), kinds):
            purpose = Purpose(kind, world.rank, peer)
            connections[kind, peer] = connect(tuple(listening[peer]), purpose, secret, seconds, address, sealed)
        for peer, kind in itertools.product(range(world.rank + 1, world.size), kinds):
            connections[kind, peer] = listener.take(Purpose(kind, peer, world.rank), deadline)
        data = {peer: joined.socket for (kind, peer), joined in connections.items() if kind == DATA}
        check_packet_sizes(world, data, seconds)
        if keep and len(set(world.hosts)) > 1:
            keep(listener, listening)
            listener = None
    except CommError:
        for joined in connections.values():  # peers must not wait for this rank
            joined.socket.close()
        raise
    finally:
        if listener:
            listener.close()
    return [_detached(connections, kind, world) for kind in kinds]


def _detached(connections: dict[tuple[bytes, int], Joined], kind: bytes, world: World) -> Connections:
    """Gives the connections of one kind away."""
    descriptors, keys = list[int](), list[bytes]()
    for peer in range(world.size):
        joined = connections.get((kind, peer))
        descriptors.append(joined.socket.detach() if joined else -1)
        keys.append(joined.keys if joined else b"")
    longest = max(map(len, keys))
    return Connections(descriptors, b"".join(key.ljust(longest, b"\0") for key in keys))


def seals(world: World) -> bool:
    """Returns True if the ranks seal their traffic over TCP: ranks of several hosts do, without `--encrypt never`."""
    return len(set(world.hosts)) > 1 and getattr(world, "encrypt", "auto") != "never"


def common_address(world: World) -> str:
    """Returns this rank's IPv4 address on the fastest network that all hosts share. A collective call.

    Container bridges have the same address on every host, so a network counts only if all addresses differ. Raises
    ConfigError on every rank if there is no such network.
    """
    import psutil

    speeds = psutil.net_if_stats()
    own = {}  # network -> address, speed in Mbit/s
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for a in addresses:
            if a.family == sockets.AF_INET and a.netmask and name in speeds and "up" in speeds[name].flags.split(","):
                own[str(ipaddress.ip_network(f"{a.address}/{a.netmask}", strict=False))] = [
                    a.address,
                    speeds[name].speed,
                ]
    ranks = world.gather(own)
    if len(set(world.hosts)) == 1:
        return "127.0.0.1"
    networks = []
    for network in ranks[0]:
        there = {host: r[network] for host, r in zip(world.hosts, ranks, strict=True) if network in r}
        if len(there) == len(set(world.hosts)) == len({address for address, _ in there.values()}):
            networks.append((-min(speed for _, speed in there.values()), network))
    if not networks:
        raise ConfigError(
            f"no network has all hosts on it: name the interface or address to use in "
            f"{INTERFACE_VARIABLE} on every host"
        )
    return own[min(networks)[1]][0]

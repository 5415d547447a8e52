"""TCP connections between every two ranks, each proven at both ends; the native transport takes them over."""

import fcntl
import ipaddress
import secrets as random
import socket
import struct
import time

from ckdist.comm.handshake import Listener, Purpose, connect
from ckdist.comm.tcp_world import address_of
from ckdist.errors import ConfigError

MAX_LANES = 16
_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8


def connect_mesh(world, interface: str | None, lanes: int, timeout: float, log=None) -> list[int]:
    """File descriptors (size * (lanes + 1)), those of this rank itself -1. A collective call.

    `interface`: name or address that this rank listens at; default: the one that reaches the master, or one in a network that all hosts share.
    `lanes`: connections for data between two ranks, for links that one cannot fill; one more is for signs of life alone.
    """
    if not 1 <= lanes <= MAX_LANES:
        raise ConfigError(f"{lanes} connections between two ranks; use 1 to {MAX_LANES}")
    secret = getattr(world, "secret", None) or world.broadcast(random.token_bytes(32) if world.rank == 0 else None)
    if interface:
        address = address_of(interface)
    else:
        address = getattr(world, "address", None) or common_address(world.gather(interfaces()), world.hosts, world.rank)
    listener = Listener(address, 0, world.rank, secret, log=log)
    lanes += 1
    try:
        addresses = world.gather(list(listener.address))
        deadline = time.monotonic() + timeout
        connections = {}
        for peer in range(world.rank):
            for lane in range(lanes):
                connections[peer, lane] = connect(tuple(addresses[peer]), Purpose(b"data", world.rank, peer, lane), secret, timeout, address)
        for peer in range(world.rank + 1, world.size):
            for lane in range(lanes):
                connections[peer, lane] = listener.take(Purpose(b"data", peer, world.rank, lane), deadline)
    finally:
        listener.close()
    return [connections[peer, lane].detach() if peer != world.rank else -1 for peer in range(world.size) for lane in range(lanes)]


def interfaces() -> list[list[str]]:
    """Name, address and network of this host's interfaces that are up and lead elsewhere; IPv4."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            ask = lambda what: fcntl.ioctl(probe.fileno(), what, struct.pack("256s", name.encode()[:15]))
            try:
                (flags,) = struct.unpack_from("H", ask(_SIOCGIFFLAGS), 16)
                address, mask = (socket.inet_ntoa(ask(what)[20:24]) for what in (_SIOCGIFADDR, _SIOCGIFNETMASK))
            except OSError:
                continue  # it has no IPv4 address
            if flags & _IFF_UP and not flags & _IFF_LOOPBACK:
                found.append([name, address, str(ipaddress.ip_interface(f"{address}/{mask}").network)])
    return found


def common_address(found: list[list[list[str]]], hosts, rank: int) -> str:
    """The address at which `rank` is reached by all others, from what `interfaces` found on each rank: in the first network, as rank 0 lists them, that
    every host has a different address in; else every host's only one. ConfigError, alike on all ranks, with what to set where there is none."""
    if len(set(hosts)) == 1:
        return "127.0.0.1"
    of_host = {host: [(n, a, w) for n, a, w in found[r]] for r, host in enumerate(hosts)}
    for _, _, network in of_host[hosts[0]]:
        shared = {host: [a for _, a, w in entries if w == network] for host, entries in of_host.items()}
        addresses = [entries[0] for entries in shared.values() if entries]
        if len(set(addresses)) == len(shared):  # bridges of containers have the same address on every host
            return shared[hosts[rank]][0]
    if all(len(entries) == 1 for entries in of_host.values()) and len({e[0][1] for e in of_host.values()}) == len(of_host):
        return of_host[hosts[rank]][0][1]
    have = "; ".join(f"{host.split('/')[0]} has {', '.join(f'{n} {a}' for n, a, _ in entries) or 'none'}" for host, entries in of_host.items())
    raise ConfigError(f"no network joins all {len(of_host)} hosts, so name the interface or address to use between them on each (CKDIST_INTERFACE, or interface=): {have}")

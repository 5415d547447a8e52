"""TCP connections between every two ranks, each proven at both ends; the native transport takes them over."""

import ipaddress
import socket as sockets
import time

from ckdist.comm.bootstrap.handshake import Listener, Purpose, connect, job_secret
from ckdist.comm.bootstrap.packet_sizes import check_packet_sizes
from ckdist.comm.bootstrap.tcp_world import INTERFACE_VARIABLE, address_of
from ckdist.comm.protocol import Log, World
from ckdist.errors import CommError, ConfigError

MAX_LANES = 16
# all ranks are there and on their way to this point; how long a step may take later does not matter here
CONNECT_SECONDS = 30.0


def connect_ranks(
    world: World, interface: str | None, lanes: int, log: Log | None = None, seconds: float = CONNECT_SECONDS
) -> list[int]:
    """File descriptors (size * (lanes + 1)), those of this rank itself -1, the last to every rank for heartbeats alone.
    A collective call.

    `interface`: name or address that this rank listens at; default: the one that reached the master, or that
    `common_address` finds. `lanes`: connections for data between two ranks, several for links that one cannot fill,
    none where another transport carries it. Between hosts these are tried with large messages (`packet_sizes`). A rank
    that cannot listen is an error on every rank.
    """
    if not 0 <= lanes <= MAX_LANES:
        raise ConfigError(f"{lanes} connections between two ranks; use up to {MAX_LANES}")
    secret = job_secret(world)
    reached = getattr(world, "address", None)  # by the master
    found = reached if interface or reached is not None else common_address(world)
    listener, address, problem = None, "", ""
    connections: dict[tuple[int, int], sockets.socket] = {}
    try:
        address = address_of(interface) if interface else str(found)
        listener = Listener(address, 0, world.rank, secret, log=log)
    except ConfigError as error:
        problem = str(error)
    try:
        told = world.gather(list(listener.address) if listener else problem)
        if refused := [(rank, t) for rank, t in enumerate(told) if isinstance(t, str)]:
            raise ConfigError(f"rank {refused[0][0]}: {refused[0][1]}")
        assert listener is not None  # or this rank's problem was among the refused
        deadline = time.monotonic() + seconds
        for peer in range(world.rank):
            for lane in range(lanes + 1):
                connections[peer, lane] = connect(
                    tuple(told[peer]), Purpose(b"data", world.rank, peer, lane), secret, seconds, address
                )
        for peer in range(world.rank + 1, world.size):
            for lane in range(lanes + 1):
                connections[peer, lane] = listener.take(Purpose(b"data", peer, world.rank, lane), deadline)
        data = {place: connection for place, connection in connections.items() if place[1] < lanes}
        check_packet_sizes(world, data, seconds)
    except CommError:
        for connection in connections.values():  # peers that wait for this rank go on
            connection.close()
        raise
    finally:
        if listener:
            listener.close()
    return [
        connections[peer, lane].detach() if peer != world.rank else -1
        for peer in range(world.size)
        for lane in range(lanes + 1)
    ]


def common_address(world: World) -> str:
    """This rank's IPv4 address on the fastest network that all hosts are on, each with an address of its own; a
    collective call.

    Bridges for containers have the same address on every host and are no such network. ConfigError on every rank where
    there is none.
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

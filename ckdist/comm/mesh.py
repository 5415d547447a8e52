"""TCP connections between every two ranks, each proven at both ends; the native transport takes them over."""

import secrets as random
import time

import socket as sockets

from ckdist.comm.handshake import Listener, Purpose, connect
from ckdist.comm.tcp_world import address_of
from ckdist.errors import ConfigError

MAX_LANES = 16


def connect_mesh(world, interface: str | None, lanes: int, timeout: float, log=None) -> list[int]:
    """File descriptors (size * lanes), those of this rank itself -1. A collective call.

    `interface`: name or address that this rank listens at; default: the one that reaches the master, or the host's name.
    `lanes`: connections between two ranks, for links that one cannot fill.
    """
    if not 1 <= lanes <= MAX_LANES:
        raise ConfigError(f"{lanes} connections between two ranks; use 1 to {MAX_LANES}")
    secret = getattr(world, "secret", None) or world.broadcast(random.token_bytes(32) if world.rank == 0 else None)
    address = address_of(interface) if interface else getattr(world, "address", None) or sockets.gethostbyname(sockets.gethostname())
    listener = Listener(address, 0, world.rank, secret, log=log)
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

"""A wire with delay and loss: a process that forwards packets between TUN devices, one for each host.

The kernels of many virtual machines lack `netem`. One core forwards about 20,000 packets a second here, so this is for
slow links.
"""

import contextlib
import fcntl
import heapq
import ipaddress
import itertools
import multiprocessing
import os
import random
import select
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # of <linux/if_tun.h>
MOST = 65536  # bytes of a packet
HELD = 4096  # packets on their way to one host; more are dropped, as in a router
DESTINATION = slice(16, 20)  # of an IPv4 header


@dataclass(frozen=True)
class Wire:
    """Seconds from one host to another, and the part of packets that are lost, each way."""

    delay: float
    loss: float


def open_device(name: str) -> int:
    """Makes a TUN device. It exists until its descriptor is closed."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def forward(devices: dict[bytes, int], wire: Wire) -> None:
    """Forwards until it is killed. `devices`: the descriptor of each host's packed address."""
    draw, order = random.Random(0), itertools.count()
    on_way: list[tuple[float, int, int, bytes]] = []  # (due, order, descriptor, packet)
    held = dict.fromkeys(devices.values(), 0)
    while True:
        wait = None if not on_way else max(0.0, on_way[0][0] - time.monotonic())
        for source in select.select(list(held), [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                while packet := os.read(source, MOST):
                    target = devices.get(packet[DESTINATION])
                    if target is not None and held[target] < HELD and draw.random() >= wire.loss:
                        held[target] += 1
                        heapq.heappush(on_way, (time.monotonic() + wire.delay, next(order), target, packet))
        while on_way and on_way[0][0] <= time.monotonic():
            target, packet = heapq.heappop(on_way)[2:]
            held[target] -= 1
            with contextlib.suppress(OSError):  # the host is gone, or its queue is full
                os.write(target, packet)


@contextlib.contextmanager
def wired(names: dict[str, str], wire: Wire) -> Iterator[None]:
    """TUN devices of these names and their hosts' addresses, in this namespace, joined while the `with` lasts."""
    devices = {name: open_device(name) for name in names}
    packed = {ipaddress.ip_address(address).packed: devices[name] for name, address in names.items()}
    process = multiprocessing.get_context("fork").Process(target=forward, args=(packed, wire), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
        for device in devices.values():
            os.close(device)

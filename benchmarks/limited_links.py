"""Hosts on this machine: network namespaces behind one bridge, each with a token bucket on either end of its link
(bursts of two milliseconds), and one core: those of this machine in turn. With a delay, TUN
devices take the place of the bridge. Needs root, ip and tc.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.delayed_link import LinkDelay, delayed_links

ADDRESS = "10.88.{}.{}"


@dataclass(frozen=True)
class Host:
    """A namespace, its address, and the core that its processes share."""

    name: str
    address: str
    core: int

    def command(self, words: list[str]) -> list[str]:
        """The same command in this host."""
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "bash", "-c"]
        return [*inside, f'hostname {self.name} && exec "$@"', "-", "taskset", "-c", str(self.core), *words]


def run(*words: str) -> None:
    """A command that must work."""
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


def limit(where: str, device: str, megabits: int) -> None:
    """Gives a device in a namespace a token bucket."""
    bucket = ["rate", f"{megabits}mbit", "burst", f"{max(32, megabits // 4)}kb", "latency", "100ms"]
    run("tc", "-n", where, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def connect(where: str, device: str, address: str) -> None:
    """Gives a host's device its address, and starts it."""
    run("ip", "-n", where, "addr", "add", f"{address}/24", "dev", device)
    run("ip", "-n", where, "link", "set", device, "up")
    run("ip", "-n", where, "link", "set", "lo", "up")


@contextlib.contextmanager
def network(count: int, megabits: int, delay: LinkDelay | None = None, packet: int = 1500) -> Iterator[list[Host]]:
    """`count` hosts, whose links send at most `megabits` a second, over a bridge, or over links with a delay.

    `packet`: most bytes of a packet with a delay. One process forwards them all.
    """
    key = os.getpid() % 10000
    bridge, names = f"lk{key}s", [f"lk{key}h{i}" for i in range(count)]
    addresses = [ADDRESS.format(key % 250, i + 1) for i in range(count)]
    links, cores = [f"lk{key}e{i}" for i in range(count)], sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        try:
            for name in (bridge, *names):
                run("ip", "netns", "add", name)
            if delay:
                stack.enter_context(delayed_links(dict(zip(links, addresses, strict=True)), delay))
                for name, link, address in zip(names, links, addresses, strict=True):
                    run("ip", "link", "set", link, "netns", name)
                    connect(name, link, address)
                    run("ip", "-n", name, "link", "set", link, "mtu", str(packet))
                    limit(name, link, megabits)
            else:
                run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
                run("ip", "-n", bridge, "link", "set", "bridge", "up")
                for i, (name, link, address) in enumerate(zip(names, links, addresses, strict=True)):
                    port = f"port{i}"
                    run("ip", "link", "add", link, "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
                    run("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
                    connect(name, link, address)
                    limit(name, link, megabits)
                    limit(bridge, port, megabits)
            yield [
                Host(name, address, cores[i % len(cores)])
                for i, (name, address) in enumerate(zip(names, addresses, strict=True))
            ]
        finally:
            for name in (bridge, *names):
                subprocess.run(("ip", "netns", "del", name), capture_output=True, timeout=20)

"""Hosts on this machine: network namespaces behind one bridge, each with a token bucket on either end of its link
(bursts of two milliseconds), and one core: those of this machine in turn. Needs root, ip and tc.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

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


@contextlib.contextmanager
def network(count: int, megabits: int) -> Iterator[list[Host]]:
    """So many hosts, whose links send at most so many megabits a second."""
    key = os.getpid() % 10000
    bridge, names = f"lk{key}s", [f"lk{key}h{i}" for i in range(count)]
    addresses = [ADDRESS.format(key % 250, i + 1) for i in range(count)]
    cores = sorted(os.sched_getaffinity(0))
    try:
        for name in (bridge, *names):
            run("ip", "netns", "add", name)
        run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            port, link = f"port{i}", f"lk{key}e{i}"
            run("ip", "link", "add", link, "netns", name, "type", "veth", "peer", "name", port, "netns", bridge)
            run("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", name, "addr", "add", f"{addresses[i]}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for where, device in ((name, link), (bridge, port)):
                bucket = ["rate", f"{megabits}mbit", "burst", f"{max(32, megabits // 4)}kb", "latency", "100ms"]
                run("tc", "-n", where, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)
        yield [
            Host(name, address, cores[i % len(cores)])
            for i, (name, address) in enumerate(zip(names, addresses, strict=True))
        ]
    finally:
        for name in (bridge, *names):
            subprocess.run(("ip", "netns", "del", name), capture_output=True, timeout=20)

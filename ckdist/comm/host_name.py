"""The names of hosts among the ranks of a job."""

import contextlib
import pathlib
import socket

from ckdist.comm.world_protocol import World


def host_name() -> str:
    """Returns this host's name. Ranks with the same name can share memory.

    Two machines may have the same host name, so the boot id is appended. So is the process namespace, because shared
    memory is found through /proc.
    """
    parts = [socket.gethostname()]
    for read in (
        lambda: pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()[:8],
        lambda: str(pathlib.Path("/proc/self/ns/pid").readlink()),
    ):
        with contextlib.suppress(OSError):
            parts.append(read())
    return "/".join(parts)


def machine_name(host: str) -> str:
    """The part of a host's name that a person knows, safe to print: it came from a peer. At most 64 characters."""
    return "".join(c if c.isprintable() else "?" for c in host.split("/", maxsplit=1)[0][:64])


def rank_on_host(world: World, rank: int) -> str:
    """A rank and its host, for messages."""
    return f"rank {rank} ({machine_name(world.hosts[rank])})"

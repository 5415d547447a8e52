"""What a host is called among the ranks of a job."""

import contextlib
import pathlib
import socket


def host_name() -> str:
    """Ranks with the same name can share memory.

    The name of the machine alone does not tell: two machines may have the same, so it is joined by the boot, and by the
    process namespace, because memory is found through /proc.
    """
    parts = [socket.gethostname()]
    for what in (
        lambda: pathlib.Path("/proc/sys/kernel/random/boot_id").read_text()[:8],
        lambda: str(pathlib.Path("/proc/self/ns/pid").readlink()),
    ):
        with contextlib.suppress(OSError):
            parts.append(what())
    return "/".join(parts)


def machine_name(host: str) -> str:
    """The part of a host's name that a person knows, at most 64 characters: peers sent it, and it goes into
    messages.
    """
    return "".join(c if c.isprintable() else "?" for c in host.split("/", maxsplit=1)[0][:64])

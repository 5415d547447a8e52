"""What systemd is told of a service with Type=notify, as sd_notify(3) describes it. Without systemd nothing is."""

import contextlib
import os
import socket

VARIABLE = "NOTIFY_SOCKET"


def notify(*states: str) -> None:
    """Tells `states`, as READY=1, in one message; a manager that does not listen is no error."""
    address = os.environ.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(1.0)
        sender.sendto("\n".join(states).encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)

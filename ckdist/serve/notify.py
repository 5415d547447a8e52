"""Sends states to systemd, for a service with Type=notify (see sd_notify(3))."""

import contextlib
import os
import socket

VARIABLE = "NOTIFY_SOCKET"


def notify(*states: str) -> None:
    """Sends `states`, such as READY=1, in one message. Does nothing without systemd, or if it does not listen."""
    address = os.environ.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.settimeout(1.0)
        sender.sendto("\n".join(states).encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)

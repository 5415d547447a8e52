"""Loopback addresses."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether the address `host` is a loopback address."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False

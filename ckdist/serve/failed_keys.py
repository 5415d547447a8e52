"""Counts wrong keys by client address. After FREE_FAILURES of them an address has to wait, longer each time."""

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

FREE_FAILURES = 5
MAX_SECONDS = 60
FORGET_SECONDS = 600.0
MAX_ENTRIES = 4096  # addresses, and keys that they used; the least recently used are dropped


@dataclass
class Failures:
    """The wrong keys of one address."""

    count: int = 0
    last: float = 0.0
    wait_until: float = 0.0


class FailedKeys:
    """The failures of all addresses.

    While an address has to wait, keys that it used before are still accepted. So clients that share an address with an
    attacker, as behind a proxy, are not locked out.
    """

    def __init__(self) -> None:
        self._failures: OrderedDict[Hashable, Failures] = OrderedDict()
        self._accepted: OrderedDict[Hashable, None] = OrderedDict()

    def wait_seconds(self, host: str) -> int:
        """Seconds until the next new key of this address is checked; 0: no wait."""
        known = self._failures.get(network(host))
        return 0 if known is None else max(0, math.ceil(known.wait_until - time.monotonic()))

    def add(self, host: str) -> None:
        """Counts a wrong key."""
        now, known = time.monotonic(), self._failures.pop(network(host), None)
        if known is None or now - known.last > FORGET_SECONDS:
            known = Failures()
        known.count, known.last = known.count + 1, now
        if known.count >= FREE_FAILURES:
            known.wait_until = now + min(MAX_SECONDS, 2 ** (known.count - FREE_FAILURES))
        _keep(self._failures, network(host), known)

    def accept(self, host: str, name: str) -> None:
        """Remembers that this address has used a valid key."""
        entry = (network(host), name)
        self._accepted.pop(entry, None)
        _keep(self._accepted, entry, None)

    def has_accepted(self, host: str, name: str) -> bool:
        """True if this address has used a key of this name before."""
        return (network(host), name) in self._accepted


def _keep(entries: OrderedDict[Hashable, Any], key: Hashable, value: Failures | None) -> None:
    entries[key] = value
    if len(entries) > MAX_ENTRIES:
        entries.popitem(last=False)


def network(host: str) -> str:
    """Returns the address, or the /64 network of an IPv6 address, since one client may own all of that."""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host

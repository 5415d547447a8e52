"""Wrong keys by client address: after some of them an address has to wait, longer each time."""

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

FREE_FAILURES = 5
MAX_SECONDS = 60
FORGET_SECONDS = 600.0
MAX_ENTRIES = 4096  # of addresses, and of their accepted keys; the least recently used give way

Value = TypeVar("Value")


@dataclass
class Failures:
    """Wrong keys of one address."""

    count: int = 0
    last: float = 0.0
    wait_until: float = 0.0


class FailedKeys:
    """Memory of failures.

    A key that an address used before is accepted while the address has to wait: clients that share an address with an
    attacker, as behind a proxy, are not locked out.
    """

    def __init__(self) -> None:
        self._failures: OrderedDict[Hashable, Failures] = OrderedDict()
        self._accepted: OrderedDict[Hashable, None] = OrderedDict()

    def wait_seconds(self, host: str) -> int:
        """Seconds that this address has to wait before its next new key is looked at; 0: none."""
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
        """Notes that this address has a right key."""
        entry = (network(host), name)
        self._accepted.pop(entry, None)
        _keep(self._accepted, entry, None)

    def has_accepted(self, host: str, name: str) -> bool:
        """Whether this address has used a key of this name before."""
        return (network(host), name) in self._accepted


def _keep(entries: OrderedDict[Hashable, Value], key: Hashable, value: Value) -> None:
    entries[key] = value
    if len(entries) > MAX_ENTRIES:
        entries.popitem(last=False)


def network(host: str) -> str:
    """The address, or the /64 network of an IPv6 address: one client may have all of that."""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host

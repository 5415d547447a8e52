"""Accounts: the use and the limits of a client, which is all keys of one name, or an address without keys."""

import hashlib
import hmac
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from msgspec import structs

from ckdist.engine.messages import Embed, Submit
from ckdist.engine.queue_place import QueuePlace
from ckdist.engine.tenant import ONE_TENANT
from ckdist.serve.api_keys import ApiKey, KeyLimits
from ckdist.serve.failed_keys import network
from ckdist.serve.problems import Problem

WINDOW_SECONDS = 60
NO_KEY = "-"  # name of the accounts of clients without keys
MAX_ADDRESSES = 4096  # with accounts of their own; the least recently used are forgotten


def part_of(total: int, others: int) -> int:
    """The most of `total` places that a client may have while others have `others`: 7/8 of the rest, rounded up."""
    return -(-7 * (total - others) // 8)


class HeldMessage(NamedTuple):
    """A message that an account holds, and the function that sends it: models have engines of their own."""

    message: Submit | Embed
    send: "Callable[[Account, Submit | Embed], None]"


class Account:
    """The use and the limits of a client.

    Attributes:
        client: The client's name in the queues of rank 0.
        under_way: The number of HTTP requests.
        root: The tenant of requests without a cache salt.
        running: The number of sequences in the engine.
        held: Messages of waiting sequences by id. They are sent once fewer than `max_running` sequences run.
    """

    def __init__(
        self, name: str = NO_KEY, root: bytes = ONE_TENANT, limits: KeyLimits | None = None, address: str = ""
    ) -> None:
        self.name, self.root, self.limits = name, root, limits or KeyLimits()
        self.client = address if name == NO_KEY else name
        self._label = f"address {address}" if name == NO_KEY else f"key {name!r}"
        self.running = self.under_way = 0
        self.held: OrderedDict[str, HeldMessage] = OrderedDict()
        self._used: deque[tuple[int, int]] = deque()  # (second, tokens) within the last WINDOW_SECONDS

    @property
    def is_full(self) -> bool:
        """True if a further sequence has to wait."""
        most = self.limits.max_running
        return most is not None and self.running >= most

    @property
    def sequences(self) -> int:
        """The number of sequences that run or wait."""
        return self.running + len(self.held)

    def place(self, wanted: QueuePlace) -> QueuePlace:
        """Returns a request's place in the queues of rank 0."""
        return structs.replace(wanted, client=self.client)

    def next_held(self) -> HeldMessage:
        """Removes and returns the message that is sent next: interactive first, then by priority and arrival."""
        order = lambda held: (held.message.place.batch, held.message.place.priority)
        return self.held.pop(min(self.held.values(), key=order).message.id)

    def check_places(self, count: int, total: int, active: int) -> None:
        """Raises Problem if `count` more sequences are too many of the server's.

        400 if a client may never have that many, 429 if there is no place for them now.

        Args:
            total: The server's places for running and waiting sequences.
            active: Sequences of all clients.
        """
        most, flags = part_of(total, active - self.sequences), "--parallel and --max-queue"
        if count > part_of(total, 0):
            message = f"the request asks for {count} sequences; one client may have {part_of(total, 0)}"
            raise Problem(400, f"{message} of the server's {total} ({flags})")
        if active + count > total:
            raise Problem(429, f"{active} sequences run or wait, of at most {total} ({flags}); try again later")
        if self.sequences + count > most:
            message = f"{self.sequences} sequences of {self._label} run or wait, and {count} more exceed the {most}"
            raise Problem(429, f"{message} that one client may have of {total} now ({flags}); try again later")

    def check_requests(self, total: int, active: int) -> None:
        """Raises Problem 429 if one more HTTP request is too many. The arguments are as for `check_places`."""
        most = part_of(total, active - self.under_way)
        if self.under_way >= most:
            message = f"{self.under_way} requests of {self._label} are under way, of at most {most} of {total} now"
            raise Problem(429, f"{message}; try again later")

    def tenant(self, salt: str | None, reuse: bool) -> bytes | None:
        """Returns a request's tenant: one per account and salt. None if the request does not use the prefix cache."""
        if not reuse:
            return None
        if salt is None:
            return self.root
        return hashlib.blake2b(salt.encode(), key=self.root, digest_size=32, person=b"ckdist salt").digest()

    def check_sequences(self, count: int) -> None:
        """Raises Problem 400 if the limits never allow `count` sequences, and 429 if they do not allow them now."""
        running, waiting = self.limits.max_running, self.limits.max_waiting
        if running is None or waiting is None or self.sequences + count <= running + waiting:
            return
        most = f"max_running {running} and max_waiting {waiting} of {self._label}"
        if count > running + waiting:
            raise Problem(400, f"the request asks for {count} sequences, which exceeds {most}")
        raise Problem(429, f"{self.sequences} sequences run or wait, and {count} more exceed {most}; try again later")

    def take_tokens(self, count: int) -> None:
        """Counts a prompt's tokens. Raises Problem 400 if they exceed a minute's limit, 429 if too few are left."""
        limit = self.limits.tokens_per_minute
        if limit is None:
            return
        if count > limit:
            raise Problem(400, f"{count} tokens exceed tokens_per_minute {limit} of {self._label}")
        self._forget()
        used = sum(tokens for _, tokens in self._used)
        if used + count > limit:
            message = f"{used} tokens were used within a minute, and {count} more exceed tokens_per_minute {limit}"
            wait = self._seconds_until(used + count - limit)
            raise Problem(429, f"{message} of {self._label}; try again in {wait} s", retry_after=wait)
        self.count_tokens(count)

    def count_tokens(self, count: int) -> None:
        """Counts generated tokens."""
        if self.limits.tokens_per_minute is None or not count:
            return
        second = int(time.monotonic())
        if self._used and self._used[-1][0] == second:
            count += self._used.pop()[1]
        self._used.append((second, count))
        self._forget()

    def _forget(self) -> None:
        while self._used and self._used[0][0] + WINDOW_SECONDS < time.monotonic():
            self._used.popleft()

    def _seconds_until(self, tokens: int) -> int:
        """Seconds until `tokens` of the counted tokens are older than a minute."""
        for second, count in self._used:
            tokens -= count
            if tokens <= 0:
                return max(1, math.ceil(second + WINDOW_SECONDS - time.monotonic()) + 1)
        return WINDOW_SECONDS


class Accounts:
    """All accounts: by the names of keys, or without keys by address.

    Args:
        shared_cache: All keys share one tenant of the prefix cache.
        limits: Limits of a client whose key has none of its own.
    """

    def __init__(self, keys: Iterable[ApiKey], shared_cache: bool, limits: KeyLimits | None = None) -> None:
        self._shared_cache, self._limits = shared_cache, limits or KeyLimits()
        self._by_name: dict[str, Account] = {}
        self._by_address: OrderedDict[str, Account] = OrderedDict()
        self._keys: tuple[tuple[bytes, Account], ...] = ()
        self.replace(keys)

    @property
    def ask_for_key(self) -> bool:
        """True if clients need a key."""
        return bool(self._keys)

    @property
    def names(self) -> list[str]:
        """Names of the keys."""
        return list(self._by_name)

    @property
    def have_rights(self) -> bool:
        """True if a key has the right to change models."""
        return any(account.limits.models for account in self._by_name.values())

    def root(self, name: str) -> bytes:
        """The tenant of a key's requests without a cache salt."""
        return self._by_name[name].root

    def named(self, name: str) -> Account | None:
        """Returns the account of the keys with this name, or None."""
        return self._by_name.get(name)

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replaces the keys. A name that stays keeps its account, with its new limits."""
        known, self._by_name = self._by_name, {}
        found = []
        for item in keys:
            root = ONE_TENANT if self._shared_cache else item.tenant
            account = self._by_name.get(item.name) or known.get(item.name) or Account(item.name, root)
            account.limits = item.limits.over(self._limits)
            self._by_name[item.name] = account
            found.append((item.key.encode(), account))
        self._keys = tuple(found)

    def at_address(self, host: str) -> Account:
        """Returns the account of an address, or of an IPv6 network, on a server without keys."""
        address = network(host)
        account = self._by_address.pop(address, None) or Account(limits=self._limits, address=address)
        self._by_address[address] = account
        if len(self._by_address) > MAX_ADDRESSES:
            idle = (name for name, other in self._by_address.items() if not other.sequences and not other.under_way)
            self._by_address.pop(next(idle, address))
        return account

    def find(self, given: Iterable[bytes]) -> Account | None:
        """Returns the account of the first known key in `given`, or None."""
        # All keys are compared, each in constant time, so that the duration reveals nothing about them.
        same = [account for key in given for known, account in self._keys if hmac.compare_digest(key, known)]
        return same[0] if same else None

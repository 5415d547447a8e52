"""Accounts: the use and the limits of all clients whose keys have one name."""

import hashlib
import hmac
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable

from ckdist.engine.messages import Embed, Submit
from ckdist.engine.tenant import ONE_TENANT
from ckdist.serve.api_keys import ApiKey, KeyLimits
from ckdist.serve.problems import Problem

WINDOW_SECONDS = 60
NO_KEY = "-"  # name of the account of clients without keys


class Account:
    """The use and the limits of all clients whose keys have one name.

    Attributes:
        root: The tenant of requests without a cache salt.
        running: The number of sequences in the engine.
        held: Messages of waiting sequences by id. They are sent once fewer than `max_running` sequences run.
    """

    def __init__(self, name: str = NO_KEY, root: bytes = ONE_TENANT, limits: KeyLimits | None = None) -> None:
        self.name, self.root, self.limits = name, root, limits or KeyLimits()
        self.running = 0
        self.held: OrderedDict[str, Submit | Embed] = OrderedDict()
        self._used: deque[tuple[int, int]] = deque()  # (second, tokens) within the last WINDOW_SECONDS

    @property
    def is_full(self) -> bool:
        """Whether a further sequence has to wait."""
        most = self.limits.max_running
        return most is not None and self.running >= most

    @property
    def sequences(self) -> int:
        """The number of sequences that run or wait."""
        return self.running + len(self.held)

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
        most = f"max_running {running} and max_waiting {waiting} of key {self.name!r}"
        if count > running + waiting:
            raise Problem(400, f"the request asks for {count} sequences, which exceeds {most}")
        raise Problem(429, f"{self.sequences} sequences run or wait, and {count} more exceed {most}; try again later")

    def take_tokens(self, count: int) -> None:
        """Counts a prompt's tokens. Raises Problem 400 if they exceed a minute's limit, 429 if too few are left."""
        limit = self.limits.tokens_per_minute
        if limit is None:
            return
        if count > limit:
            raise Problem(400, f"{count} tokens exceed tokens_per_minute {limit} of key {self.name!r}")
        self._forget()
        used = sum(tokens for _, tokens in self._used)
        if used + count > limit:
            message = f"{used} tokens were used within a minute, and {count} more exceed tokens_per_minute {limit}"
            wait = self._seconds_until(used + count - limit)
            raise Problem(429, f"{message} of key {self.name!r}; try again in {wait} s", retry_after=wait)
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
    """All accounts, by name. Without keys all clients share the account `anyone`."""

    def __init__(self, keys: Iterable[ApiKey], shared_cache: bool) -> None:
        """`shared_cache`: all keys share one tenant of the prefix cache."""
        self._shared_cache = shared_cache
        self._by_name: dict[str, Account] = {}
        self._keys: tuple[tuple[bytes, Account], ...] = ()
        self.anyone = Account()
        self.replace(keys)

    @property
    def ask_for_key(self) -> bool:
        """Whether clients need a key."""
        return bool(self._keys)

    @property
    def names(self) -> list[str]:
        """Names of the keys."""
        return list(self._by_name)

    def root(self, name: str) -> bytes:
        """The tenant of a key's requests without a cache salt."""
        return self._by_name[name].root

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Replaces the keys. A name that stays keeps its account, with its new limits."""
        known, self._by_name = self._by_name, {}
        found = []
        for item in keys:
            root = ONE_TENANT if self._shared_cache else item.tenant
            account = self._by_name.get(item.name) or known.get(item.name) or Account(item.name, root)
            account.limits = item.limits
            self._by_name[item.name] = account
            found.append((item.key.encode(), account))
        self._keys = tuple(found)

    def find(self, given: Iterable[bytes]) -> Account | None:
        """Returns the account of the first known key in `given`, or None."""
        # All keys are compared, each in constant time, so that the duration reveals nothing about them.
        same = [account for key in given for known, account in self._keys if hmac.compare_digest(key, known)]
        return same[0] if same else None

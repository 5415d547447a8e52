"""Responses and conversations that are kept in memory, each for its key, within limits of time and bytes."""

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ckdist.serve.problems import Problem

CLIENT_BYTES, TOTAL_BYTES = 64 << 20, 512 << 20
RECORD_BYTES = 512  # of the objects around a record's bytes, at most

Item = tuple[str, bytes]  # id, JSON
Items = tuple[Item, ...]


@dataclass
class Kept:
    """A record. Only the key `owner` finds it; its bytes count for `client`."""

    id: str
    owner: str
    client: str
    used_at: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the record, and of all items that it refers to."""
        raise NotImplementedError


@dataclass
class KeptResponse(Kept):
    """An answer of /v1/responses."""

    body: bytes = b""  # JSON of the response
    given: Items = ()  # the items that the model has read
    output: Items = ()

    @property
    def size(self) -> int:
        """Bytes of the record, and of all items that it refers to."""
        return RECORD_BYTES + len(self.body) + bytes_of(self.given) + bytes_of(self.output)


@dataclass
class Conversation(Kept):
    """A conversation, whose items grow."""

    created: int = 0
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    items: Items = ()

    @property
    def size(self) -> int:
        """Bytes of the record, and of all items that it refers to."""
        texts = sum(4 * (len(name) + len(value)) for name, value in self.metadata.items())
        return RECORD_BYTES + texts + bytes_of(self.items)


Record = TypeVar("Record", bound=Kept)


def bytes_of(items: Iterable[Item]) -> int:
    """Bytes of items, with their ids and the objects around them."""
    return sum(len(name) + len(body) + RECORD_BYTES // 2 for name, body in items)


class ResponseStore:
    """All records, in the order of their last use. Those that were used first go first if there is no room.

    Args:
        seconds: A record is kept for this long after its last use; 0: nothing is kept.
        now: Returns the time in seconds.
    """

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float] = time.monotonic,
        client_bytes: int = CLIENT_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ):
        self.seconds, self._now = seconds, now
        self._limits = client_bytes, total_bytes
        self._records: OrderedDict[str, Kept] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._bytes: Counter[str] = Counter()  # by client

    def find(self, kind: type[Record], name: str, owner: str, what: str, param: str | None = None) -> Record:
        """Returns a record and notes its use. Raises Problem 404 if the owner has none of this name."""
        self._expire()
        record = self._records.get(name)
        if not isinstance(record, kind) or record.owner != owner:
            why = f"it was deleted or never kept, not used for {self.seconds:g} s, or made room for others"
            if not self.seconds:
                why = "nothing is kept"
            raise Problem(404, f"there is no {what} {name[:80]!r}: {why} (--store-responses)", param, "not_found")
        self._touch(record)
        return record

    def put(self, record: Kept) -> None:
        """Keeps a new or a changed record. One that has no room even alone is dropped."""
        self.drop(record)
        if not self.seconds:
            return
        size = record.size
        most_client, most = self._limits
        if size > min(most_client, most):
            return
        self._expire()
        while self._bytes[record.client] + size > most_client:
            self.drop(next(other for other in self._records.values() if other.client == record.client))
        while self._bytes.total() + size > most:
            self.drop(next(iter(self._records.values())))
        self._records[record.id], self._sizes[record.id] = record, size
        self._bytes[record.client] += size
        self._touch(record)

    def has(self, record: Kept) -> bool:
        """True if the record is kept."""
        return self._records.get(record.id) is record

    def drop(self, record: Kept) -> None:
        """Removes a record, if it is kept."""
        if self._records.pop(record.id, None) is not None:
            self._bytes -= Counter({record.client: self._sizes.pop(record.id)})  # drops clients without bytes

    def _touch(self, record: Kept) -> None:
        record.used_at = self._now()
        self._records.move_to_end(record.id)

    def _expire(self) -> None:
        while self._records:
            first = next(iter(self._records.values()))
            if self._now() - first.used_at <= self.seconds:
                return
            self.drop(first)


def new_name(kind: str) -> str:
    """Returns a name that nobody can guess."""
    return f"{kind}_{secrets.token_hex(16)}"

"""Responses and conversations that --store-responses keeps in memory, of each client, for a time and within bytes."""

import json
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ckdist.serve.accounts import Account
from ckdist.serve.problems import Problem

Item = dict[str, Any]

MAX_CLIENT_BYTES = 64 << 20
MAX_BYTES = 512 << 20
MAX_ITEMS = 10_000  # of one conversation
MAX_METADATA = 16


@dataclass
class Kept:
    """A response or a conversation.

    Attributes:
        items: Items of the input of the next turn.
        shown: The object as clients see it.
        inputs: The number of items that were a response's input.
    """

    items: list[Item]
    shown: dict[str, Any]
    inputs: int = 0
    size: int = 0
    expires_at: float = 0.0


@dataclass
class _Client:
    kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict[str, Kept])  # the least recently used first
    size: int = 0


class KeptItems:
    """All responses and conversations. An entry ends `seconds` after its last use, or when others need its room."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()

    def find(self, account: Account, name: str, kind: str) -> Kept:
        """Returns the `kind` (response or conversation) with this id. Raises Problem 404 if there is none."""
        self._forget()
        client = self._clients.get(account.root)
        kept = None if client is None else client.kept.get(name)
        if client is None or kept is None or kept.shown["object"] != kind:
            hours = f"{self.seconds:g} seconds after its last use (--store-responses)"
            raise Problem(404, f"there is no {kind} {name[:64]!r}; one is kept for {hours}", code="not_found")
        kept.expires_at = time.monotonic() + self.seconds
        client.kept.move_to_end(name)
        return kept

    def keep(self, account: Account, kept: Kept) -> None:
        """Keeps a new entry, or an entry that has changed. The oldest ones of the client make room."""
        name = kept.shown["id"]
        self.drop(account, name)
        client = self._clients.setdefault(account.root, _Client())
        self._clients.move_to_end(account.root)
        kept.size = len(json.dumps([kept.items, kept.shown]))
        kept.expires_at = time.monotonic() + self.seconds
        if kept.size > MAX_CLIENT_BYTES or len(kept.items) > MAX_ITEMS:
            return  # it is answered, and cannot be continued
        client.kept[name] = kept
        client.size += kept.size
        while client.size > MAX_CLIENT_BYTES:
            self._drop_oldest(client)
        while sum(one.size for one in self._clients.values()) > MAX_BYTES:
            self._drop_oldest(next(one for one in self._clients.values() if one.kept))

    def drop(self, account: Account, name: str) -> bool:
        """Forgets an entry. Returns whether there was one."""
        client = self._clients.get(account.root)
        kept = None if client is None else client.kept.pop(name, None)
        if client is None or kept is None:
            return False
        client.size -= kept.size
        return True

    def _drop_oldest(self, client: _Client) -> None:
        _, kept = client.kept.popitem(last=False)
        client.size -= kept.size

    def _forget(self) -> None:
        now = time.monotonic()
        for root, client in list(self._clients.items()):
            while client.kept and next(iter(client.kept.values())).expires_at < now:
                self._drop_oldest(client)
            if not client.kept:
                del self._clients[root]


def new_conversation(items: list[Item], metadata: dict[str, Any]) -> Kept:
    """Returns a new conversation. Raises Problem 400 for metadata that is no map of a few texts."""
    if len(metadata) > MAX_METADATA or not all(isinstance(value, str) for value in metadata.values()):
        raise Problem(400, f"metadata must have at most {MAX_METADATA} strings", "metadata", "invalid_value")
    shown = {
        "id": f"conv_{secrets.token_hex(12)}",
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": metadata,
    }
    return Kept([with_id(item) for item in items], shown)


def with_id(item: Item) -> Item:
    """Returns an item with an id."""
    return item if isinstance(item.get("id"), str) else {**item, "id": f"item_{secrets.token_hex(12)}"}


def input_items(given: Any) -> list[Item]:
    """Returns the input of a request as items. Raises Problem 400 for another type."""
    if isinstance(given, str):
        return [with_id({"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]})]
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
        raise Problem(400, "input must be a text, or a list of items", "input", "invalid_type")
    return [with_id(item) for item in given]

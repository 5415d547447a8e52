"""Server-sent events with the state of the machine, twice a second. All clients get the same events.

The numbers come with rank 0's status. The ranks send their counters only while somebody watches.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ckdist.serve.answer import event
from ckdist.serve.engine_client import EngineClient
from ckdist.serve.metrics import BUCKET
from ckdist.serve.problems import Problem

EVENT_SECONDS = 0.5
MAX_WATCHERS = 32  # clients at once


class Machine:
    """Makes the events. `facts` returns facts about the server, which each event repeats."""

    def __init__(self, client: EngineClient, facts: Callable[[], dict[str, Any]], state: Callable[[], str]):
        self._client, self._facts, self._state = client, facts, state
        self._watchers = 0
        self._event, self._made_at = b"", float("-inf")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields events for one client until the server drains. Raises Problem 429 if too many clients watch."""
        if self._watchers >= MAX_WATCHERS:
            raise Problem(429, f"{self._watchers} clients watch the machine, of at most {MAX_WATCHERS}; close one")
        self._watchers += 1
        try:
            while (state := self._state()) != "draining":
                yield self._current(state)
                await asyncio.sleep(EVENT_SECONDS)
        finally:
            self._watchers -= 1

    def _current(self, state: str) -> bytes:
        now = time.monotonic()
        if now - self._made_at > EVENT_SECONDS / 2:  # else another client's event is still current
            self._client.watch()
            self._event, self._made_at = event(self._content(state)), now
        return self._event

    def _content(self, state: str) -> dict[str, Any]:
        """Counters (`_total`) count from the start. Clients take differences over `clock`, in seconds."""
        client = self._client
        shown = lambda name, value: type(value) in (int, float) and not BUCKET.fullmatch(name)  # those are in /metrics
        numbers = {name: value for name, value in client.stats.items() if shown(name, value)}
        return {**self._facts(), "state": state, "clock": client.clock, "stats": numbers, "ranks": client.ranks}

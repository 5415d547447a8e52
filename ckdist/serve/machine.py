"""The machine at work, as server-sent events: one twice a second, made once for all who look.

What is in it comes with rank 0's status. Ranks are asked for their counters only while somebody looks.
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
MAX_WATCHERS = 32  # that look at once


class Machine:
    """`facts` are of the server, and stand in every event; `state` is the server's."""

    def __init__(self, client: EngineClient, facts: Callable[[], dict[str, Any]], state: Callable[[], str]):
        self._client, self._facts, self._state = client, facts, state
        self._watchers = 0
        self._event, self._made_at = b"", float("-inf")

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of one client, until the server drains. Problem 429 when too many look."""
        if self._watchers >= MAX_WATCHERS:
            raise Problem(429, f"{self._watchers} clients look at the machine, of at most {MAX_WATCHERS}; close one")
        self._watchers += 1
        try:
            while (state := self._state()) != "draining":
                yield self._current(state)
                await asyncio.sleep(EVENT_SECONDS)
        finally:
            self._watchers -= 1

    def _current(self, state: str) -> bytes:
        """The event of this half second."""
        now = time.monotonic()
        if now - self._made_at > EVENT_SECONDS / 2:
            self._client.watch()
            self._event, self._made_at = event(self._content(state)), now
        return self._event

    def _content(self, state: str) -> dict[str, Any]:
        """Counters (`_total`) are since the start; who looks takes differences over `clock`, in seconds."""
        client = self._client
        numbers = {name: value for name, value in client.stats.items() if _is_shown(name, value)}
        return {**self._facts(), "state": state, "clock": client.clock, "stats": numbers, "ranks": client.ranks}


def _is_shown(name: str, value: object) -> bool:
    """Whether a number of rank 0's is more than a bucket of a histogram, which /metrics has."""
    return type(value) in (int, float) and not BUCKET.fullmatch(name)

"""JSON encoding of answers that may be long. It yields to the event loop in between."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
TURN_ITEMS = 32
TURN_SECONDS = 0.002


class Turns:
    """Yields to the event loop once a turn has lasted TURN_SECONDS."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    async def end(self) -> None:
        """Yields if the turn is over. Call this after each small piece of work."""
        if time.monotonic() - self._begun > TURN_SECONDS:
            import asyncio  # the confined text workers encode answers, too, and need no event loop

            await asyncio.sleep(0)
            self._begun = time.monotonic()


def each(function: Callable[[Any], Any], items: Sequence[Any]) -> Sequence[Any]:
    """Applies `function` to all items. Many items become an `Each`, which only `to_json_in_turns` can encode."""
    return [function(item) for item in items] if len(items) <= TURN_ITEMS else Each(function, items)


class Each(Sequence[Any]):
    """The results of `function` for all items, computed on access."""

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any]):
        self._function, self._items = function, items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._function(item) for item in self._items[index]]
        return self._function(self._items[index])


def to_json(content: dict[str, Any] | list[Any]) -> bytes:
    """Encodes a short value at once."""
    return ENCODER.encode(content).encode("utf-8")


async def to_json_in_turns(content: dict[str, Any] | list[Any]) -> bytes:
    """Encodes a value like `to_json`, but yields to the event loop. `content` may contain an `Each` as a list."""
    turns, parts = Turns(), []
    for text in _texts(content):
        parts.append(text.encode("utf-8"))
        await turns.end()
    return b"".join(parts)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        before = "{"
        for key, item in value.items():
            yield f"{before}{ENCODER.encode(key)}:"
            yield from _texts(item)
            before = ","
        yield "}" if before == "," else "{}"
    elif isinstance(value, Each) or (isinstance(value, list) and len(value) > TURN_ITEMS):
        before = "["
        for begin in range(0, len(value), TURN_ITEMS):
            yield before + ENCODER.encode(value[begin : begin + TURN_ITEMS])[1:-1]
            before = ","
        yield "]" if before == "," else "[]"
    elif isinstance(value, list) and value:
        before = "["
        for item in value:
            yield before
            yield from _texts(item)
            before = ","
        yield "]"
    else:
        yield ENCODER.encode(value)

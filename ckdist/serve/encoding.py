"""JSON of answers that may be long, made in turns with the event loop's other work."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
TURN_ITEMS = 32
TURN_SECONDS = 0.002


class Turns:
    """Gives way to the loop's other work once its turn has lasted."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    async def end(self) -> None:
        """The end of a small piece of work, which may be the turn's."""
        if time.monotonic() - self._begun > TURN_SECONDS:
            await asyncio.sleep(0)
            self._begun = time.monotonic()


def each(function: Callable[[Any], Any], items: Sequence[Any]) -> Sequence[Any]:
    """`function` of every item, as a list; of many as an `Each`, which only `to_json_in_turns` can write."""
    return [function(item) for item in items] if len(items) <= TURN_ITEMS else Each(function, items)


class Each(Sequence[Any]):
    """`function` of every item, made when it is asked for."""

    def __init__(self, function: Callable[[Any], Any], items: Sequence[Any]):
        self._function, self._items = function, items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._function(item) for item in self._items[index]]
        return self._function(self._items[index])


def to_json(content: dict[str, Any] | list[Any]) -> bytes:
    """At once, for what is short."""
    return ENCODER.encode(content).encode("utf-8")


async def to_json_in_turns(content: dict[str, Any] | list[Any]) -> bytes:
    """The same bytes; `content` may hold an `Each` in the place of a list."""
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

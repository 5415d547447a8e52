"""Typed reading of one request's fields: wrong types, values out of range and unknown names are RequestErrors.

A field that is absent or null has its default. It knows types and ranges, not what a field is for.
"""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.json_body import kind_of


class Fields:
    """The fields of `body`, each read once by name."""

    def __init__(self, body: dict[str, Any]):
        self.body = body

    def refuse_unknown(self, known: Iterable[str], unsupported: dict[str, str]) -> None:
        """RequestError for a field outside of `known`; `unsupported` says of others why they are refused."""
        known = frozenset(known)
        for name, value in self.body.items():
            if name in known or value is None:
                continue
            if name in unsupported:
                raise RequestError(f"{name} is not supported yet{unsupported[name]}", name)
            close = difflib.get_close_matches(name[:64], known, n=1)
            raise RequestError(f"unknown field {name[:64]!r}{f', did you mean {close[0]!r}?' if close else ''}", name[:64])

    def value(self, name: str, *types: type) -> Any:
        """The field when it is one of `types`, None when absent or null."""
        value = self.body.get(name)
        if value is not None and type(value) not in types:
            wanted = "a whole number" if types == (int,) else " or ".join(dict.fromkeys(kind_of(kind()) for kind in types))
            raise RequestError(f"{name} must be {wanted}, not {value if type(value) is float else kind_of(value)}", name)
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.value(name, str)
        return default if value is None else value

    def switch(self, name: str, default: bool = False) -> bool:
        value = self.value(name, bool)
        return default if value is None else value

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self.value(name, int)
        if value is None:
            return default
        return in_range(value, name, low, high)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.value(name, int, float)
        if value is None:
            return default
        return float(in_range(value, name, low, high))

    def token_ids(self, name: str, vocab_size: int, most: int) -> tuple[int, ...]:
        value = self.value(name, list)
        if value is None:
            return ()
        if len(value) > most:
            raise RequestError(f"{name} has {len(value)} tokens; at most {most} are allowed", name)
        return check_token_ids(value, name, vocab_size)


def in_range(value, name: str, low, high):
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} ({value}) must be from {low} to {high}", name)
    return value


def check_token_ids(values: list, name: str, vocab_size: int) -> tuple[int, ...]:
    """`values` when all are whole numbers of the vocabulary."""
    for value in values:
        if type(value) is not int or not 0 <= value < vocab_size:
            shown = value if type(value) in (int, float) else kind_of(value)
            raise RequestError(f"{name} has a token ({shown}) that is not a whole number from 0 to {vocab_size - 1}", name)
    return tuple(values)

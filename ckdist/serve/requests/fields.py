"""Typed reading of one request's fields: wrong types, values out of range and unsupported values are RequestErrors.

A field that is absent or null has its default. Where a field has several names, the first that is given counts. It
knows types and ranges, not what a field is for; `field_table` has the names.
"""

import math
from typing import Any, TypeVar, overload

from ckdist.errors import RequestError
from ckdist.tokens.chat_input import kind_of

Names = str | tuple[str, ...]
Number = TypeVar("Number", int, float)


class Fields:
    """The fields of `body`, each read by name. Errors name them, behind that of the object that they stand `within`."""

    def __init__(self, body: dict[str, Any], within: str = ""):
        self.body, self.within = body, within

    def inner(self, name: str) -> "Fields":
        """The fields of the object `name`, which may be absent. RequestError for another type."""
        return Fields(self.value(name, dict) or {}, self._shown(name))

    def value(self, names: Names, *types: type) -> Any:
        """The field when it is one of `types`, None when absent or null."""
        return self._find(names, types)[1]

    @overload
    def text(self, names: Names, default: str) -> str: ...
    @overload
    def text(self, names: Names, default: None = None) -> str | None: ...
    def text(self, names: Names, default: str | None = None) -> str | None:
        """A string. RequestError for another type."""
        value = self.value(names, str)
        return default if value is None else value

    def switch(self, names: Names, default: bool = False) -> bool:
        """A boolean. RequestError for another type."""
        value = self.value(names, bool)
        return default if value is None else value

    @overload
    def integer(self, names: Names, default: int, low: int, high: int) -> int: ...
    @overload
    def integer(self, names: Names, default: None, low: int, high: int) -> int | None: ...
    @overload
    def integer(self, names: Names, default: int | None, low: int, high: int) -> int | None: ...
    def integer(self, names: Names, default: int | None, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`, which JSON may write as 3 or 3.0. RequestError for all else."""
        name, value = self._find(names, (int, float), "a whole number")
        if value is None:
            return default
        if type(value) is float:
            if not value.is_integer():
                raise RequestError(f"{name} must be a whole number, not {value}", name, "invalid_type")
            value = int(value)
        return in_range(value, name, low, high)

    def number(self, names: Names, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`. RequestError for all else."""
        name, value = self._find(names, (int, float))
        return default if value is None else float(in_range(value, name, low, high))

    def token_ids(self, names: Names, vocab_size: int, most: int) -> tuple[int, ...]:
        """At most `most` ids below `vocab_size`, none where the field is absent. RequestError for all else."""
        name, value = self._find(names, (list,))
        if value is None:
            return ()
        if len(value) > most:
            raise RequestError(f"{name} has {len(value)} tokens; at most {most} are allowed", name, "invalid_value")
        return check_token_ids(value, name, vocab_size)

    def _find(self, names: Names, types: tuple[type, ...], wanted: str | None = None) -> tuple[str, Any]:
        names = (names,) if isinstance(names, str) else names
        for name in names:
            value = self.body.get(name)
            if value is None:
                continue
            shown = self._shown(name)
            if type(value) not in types:
                wanted = wanted or " or ".join(dict.fromkeys(kind_of(kind()) for kind in types))
                raise RequestError(f"{shown} must be {wanted}, not {kind_of(value)}", shown, "invalid_type")
            return shown, value
        return self._shown(names[0]), None

    def _shown(self, name: str) -> str:
        return f"{self.within}.{name}" if self.within else name


def in_range(value: Number, name: str, low: float, high: float) -> Number:
    """`value`, which stands under `name`; RequestError unless it is from `low` to `high`."""
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} ({value}) must be from {low} to {high}", name, "invalid_value")
    return value


def check_token_ids(values: list[Any], name: str, vocab_size: int) -> tuple[int, ...]:
    """`values` when all are whole numbers of the vocabulary."""
    for value in values:
        if type(value) is not int or not 0 <= value < vocab_size:
            shown = value if type(value) in (int, float) else kind_of(value)
            message = f"{name} has a token ({shown}) that is not a whole number from 0 to {vocab_size - 1}"
            raise RequestError(message, name, "invalid_value")
    return tuple(values)

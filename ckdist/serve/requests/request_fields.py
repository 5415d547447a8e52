"""Typed reading of one request's fields.

Wrong types, values out of range and unsupported values are RequestErrors. A field that is absent or null has its
default. If a field has several names, the first that is present counts. Types and ranges are checked here;
`field_table` lists the names.
"""

import math
from typing import Any, TypeVar, overload

from ckdist.errors import RequestError
from ckdist.tokens.chat_input import kind_of

Names = str | tuple[str, ...]
Number = TypeVar("Number", int, float)


class Fields:
    """The fields of `body`, read by name. Errors name them, with the object `within` which they are as a prefix."""

    def __init__(self, body: dict[str, Any], within: str = ""):
        self.body, self.within = body, within

    def inner(self, name: str) -> "Fields":
        """Returns the fields of the object `name`, none if it is absent. Raises RequestError for another type."""
        return Fields(self.value(name, dict) or {}, self._shown(name))

    def value(self, names: Names, *types: type) -> Any:
        """Returns the field, or None if it is absent or null. Raises RequestError if its type is not in `types`."""
        return self._find(names, types)[1]

    @overload
    def text(self, names: Names, default: str) -> str: ...
    @overload
    def text(self, names: Names, default: None = None) -> str | None: ...
    def text(self, names: Names, default: str | None = None) -> str | None:
        """Returns a string. Raises RequestError for another type."""
        value = self.value(names, str)
        return default if value is None else value

    def switch(self, names: Names, default: bool = False) -> bool:
        """Returns a boolean. Raises RequestError for another type."""
        value = self.value(names, bool)
        return default if value is None else value

    @overload
    def integer(self, names: Names, default: int, low: int, high: int) -> int: ...
    @overload
    def integer(self, names: Names, default: None, low: int, high: int) -> int | None: ...
    @overload
    def integer(self, names: Names, default: int | None, low: int, high: int) -> int | None: ...
    def integer(self, names: Names, default: int | None, low: int, high: int) -> int | None:
        """Returns a whole number from `low` to `high`. Raises RequestError for all other values.

        JSON may write the number as 3 or 3.0.
        """
        name, value = self._find(names, (int, float), "a whole number")
        if value is None:
            return default
        if type(value) is float:
            if not value.is_integer():
                raise wrong(name, f"must be a whole number, not {value}", "invalid_type")
            value = int(value)
        return in_range(value, name, low, high)

    def number(self, names: Names, default: float, low: float, high: float) -> float:
        """Returns a number from `low` to `high`. Raises RequestError for all other values."""
        name, value = self._find(names, (int, float))
        return default if value is None else float(in_range(value, name, low, high))

    def token_ids(self, names: Names, vocab_size: int, most: int) -> tuple[int, ...]:
        """Returns at most `most` ids below `vocab_size`, none if the field is absent.

        Raises RequestError for all other values.
        """
        name, value = self._find(names, (list,))
        if value is None:
            return ()
        if len(value) > most:
            raise wrong(name, f"has {len(value)} tokens; at most {most} are allowed")
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
                raise wrong(shown, f"must be {wanted}, not {kind_of(value)}", "invalid_type")
            return shown, value
        return self._shown(names[0]), None

    def _shown(self, name: str) -> str:
        return f"{self.within}.{name}" if self.within else name


def wrong(name: str, text: str, code: str = "invalid_value") -> RequestError:
    """Returns the error of the field `name`. `text` follows the name in its message."""
    return RequestError(f"{name} {text}", name, code)


def in_range(value: Number, name: str, low: float, high: float) -> Number:
    """Returns `value` of the field `name`. Raises RequestError unless it is from `low` to `high`."""
    if not math.isfinite(value) or not low <= value <= high:
        raise wrong(name, f"({value}) must be from {low} to {high}")
    return value


def check_token_ids(values: list[Any], name: str, vocab_size: int) -> tuple[int, ...]:
    """Returns `values`. Raises RequestError unless all are token ids of the vocabulary."""
    for value in values:
        if type(value) is not int or not 0 <= value < vocab_size:
            shown = value if type(value) in (int, float) else kind_of(value)
            raise wrong(name, f"has a token ({shown}) that is not a whole number from 0 to {vocab_size - 1}")
    return tuple(values)

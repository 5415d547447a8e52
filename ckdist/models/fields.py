"""Reads fields of a `config.json` or of GGUF metadata with checks of type and range. Raises ModelFileError."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ckdist.errors import ModelFileError

_MISSING = object()


class Fields:
    """A mapping of names to values from an untrusted file. `where` names the file in messages.

    Each reader has a `default`; without one the field is required. A JSON null counts as absent.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, prefix: str = "", spelled: Mapping[str, str] | None = None
    ):
        """`spelled`: Name -> its name in the file, for messages."""
        self.values = values
        self.where = where
        self.prefix = prefix
        self._spelled = spelled or {}
        self._read: set[str] = set()
        self._objects: dict[str, Fields] = {}

    def but(self, values: Mapping[str, Any]) -> "Fields":
        """A copy with other values. Fields that are read there count as read here."""
        found = Fields({**self.values, **values}, self.where, self.prefix, self._spelled)
        found._read, found._objects = self._read, self._objects
        return found

    def sub(self, name: str) -> "Fields":
        """The fields of the object `name`; empty if it is absent."""
        if name in self._objects:
            return self._objects[name]
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise self.error(name, value, "an object")
        found = self._objects[name] = Fields(value, self.where, f"{self.name(name)}.")
        return found

    def name(self, name: str) -> str:
        """The field's name in the file, with the names of the objects around it."""
        return f"{self.prefix}{self._spelled.get(name, name)}"

    def error(self, name: str, value: Any, wanted: str) -> ModelFileError:
        """Returns the error for a field whose value is not as `wanted`."""
        return ModelFileError(f"{self.where}: {self.name(name)} is {repr(value)[:200]}; it must be {wanted}")

    def raw(self, name: str) -> Any:
        """The value in the file, without checks; None if absent."""
        self._read.add(name)
        return self.values.get(name)

    def has(self, name: str) -> bool:
        """True if the field is present and not null."""
        return self.raw(name) is not None

    def unread(self) -> list[tuple["Fields", str]]:
        """The fields that no reader has read, with those in objects."""
        own = [(self, name) for name in self.values if name not in self._read]
        return own + [entry for one in self._objects.values() for entry in one.unread()]

    def integer(self, name: str, default: Any = _MISSING, low: int = 1, high: int = 1 << 20) -> int:
        """A whole number from `low` to `high`. A float without a fraction is allowed."""
        value = self._get(name, default)
        if value is default:
            return value
        whole = type(value) is int or (type(value) is float and value.is_integer())
        if not whole or not low <= value <= high:
            raise self.error(name, value, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str, default: Any = _MISSING, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number, low < number <= high."""
        value = self._get(name, default)
        if value is default:
            return value
        if type(value) not in (int, float) or not low < value <= high:
            raise self.error(name, value, f"a number above {low:g} and up to {high:g}")
        return float(value)

    def numbers(self, name: str, count: int, low: float = 0.0, high: float = 1e12) -> list[float]:
        """A list of `count` finite numbers, low < number <= high."""
        values = self._get(name, _MISSING)
        values = values.tolist() if isinstance(values, np.ndarray) else values
        if not isinstance(values, list) or len(values) != count:
            raise self.error(name, values, f"a list of {count} numbers")
        return [self.but({name: value}).number(name, low=low, high=high) for value in values]

    def integers(self, name: str, count: int, high: int) -> list[int]:
        """`count` whole numbers from 1 to `high`. The file may have one number for all."""
        value = self._get(name, _MISSING)
        values = value.tolist() if isinstance(value, np.ndarray) and value.ndim else value
        values = values if isinstance(values, list) else [values] * count
        if len(values) != count:
            raise self.error(name, values, f"one number, or {count}")
        return [self.but({name: one}).integer(name, high=high) for one in values]

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.error(name, value, "true or false")
        return value

    def choice(self, name: str, known: Collection[str], default: Any = _MISSING) -> str:
        """A string that is one of `known`."""
        value = self.text(name, default)
        if value not in known:
            raise self.error(name, value, " or ".join(known) if len(known) < 3 else f"one of {', '.join(known)}")
        return value

    def text(self, name: str, default: Any = _MISSING) -> str:
        """A string."""
        value = self._get(name, default)
        if value is not default and not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def _get(self, name: str, default: Any) -> Any:
        """The raw value, or `default`. Raises ModelFileError if a required field is missing."""
        value = self.raw(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise ModelFileError(f"{self.where}: {self.name(name)} is missing")
        return default

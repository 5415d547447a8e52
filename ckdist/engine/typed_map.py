"""Records as maps that msgpack can encode, and back. The annotations of a record's fields are checked on the way back.

A record is a dataclass. Its fields are plain values, tuples, lists and maps of them, and records.
"""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ckdist.errors import RequestError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")
Reader = Callable[[Any, str], Any]  # (value, name of its field) -> the checked value

WORDS = {int: "an integer", float: "a number", str: "a string", bytes: "bytes", bool: "true or false", dict: "a map"}

PLURALS = {int: "integers", float: "numbers", str: "strings"}


class Rule(NamedTuple):
    """A limit of a field besides its type, for Annotated. The error for a wrong value is "NAME must be WORDS"."""

    words: str
    holds: Callable[[Any], bool]


class Shape(NamedTuple):
    """The fields of one kind of record."""

    types: dict[str, frozenset[type]]  # allowed types of the fields that need no reader
    readers: dict[str, Reader]  # of all fields
    needed: tuple[str, ...]  # fields without a default
    nested: tuple[str, ...]  # fields that hold a record, or None
    values: Callable[[Any], tuple[Any, ...]]  # of all fields of a record


def to_map(record: "DataclassInstance") -> dict[str, Any]:
    """Returns the fields of a record. Records in it become maps too."""
    shape = shape_of(type(record))
    values = dict(zip(shape.readers, shape.values(record), strict=True))
    for name in shape.nested:
        if values[name] is not None:
            values[name] = to_map(values[name])
    return values


def from_map(kind: type[Record], values: Any, name: str) -> Record:
    """Inverse of `to_map`, after msgpack. It changes `values`.

    Raises RequestError if a field is unknown or absent, or has a wrong type or size. `name` is the field or message
    that `values` are.
    """
    if type(values) is not dict:
        raise wrong(name, WORDS[dict])
    types, readers, needed, *_ = shape_of(kind)
    for key, value in values.items():
        if type(value) in types.get(key, ()):
            continue
        reader = readers.get(key)
        if reader is None:
            known = ", ".join(sorted(readers)) or "none"
            raise RequestError(f"unknown {name} field {str(key)[:100]!r}; the known ones are {known}", name)
        values[key] = reader(value, key)
    if len(values) < len(readers):
        for key in needed:
            if key not in values:
                values[key] = readers[key](None, key)
    return kind(**values)


def check_types(record: "DataclassInstance") -> None:
    """Raises RequestError that names the field if a field of a record has a wrong type or size."""
    for name, reader in shape_of(type(record)).readers.items():
        reader(getattr(record, name), name)


@cache
def shape_of(kind: type["DataclassInstance"]) -> Shape:
    """The shape of a kind of record, from its annotations."""
    hints = get_type_hints(kind, include_extras=True)
    declared = fields(kind)
    return Shape(
        {item.name: _types(hints[item.name]) for item in declared},
        {item.name: _reader(hints[item.name]) for item in declared},
        tuple(item.name for item in declared if item.default is MISSING and item.default_factory is MISSING),
        tuple(
            item.name for item in declared if any(map(is_dataclass, (hints[item.name], *get_args(hints[item.name]))))
        ),
        _getter([item.name for item in declared]),
    )


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) < 2:  # attrgetter returns no tuple then
        return lambda record: tuple(getattr(record, name) for name in names)
    return attrgetter(*names)


def wrong(name: str, words: str) -> RequestError:
    """The error for a field that is not what `words` say."""
    return RequestError(f"{name} must be {words}", name)


def _reader(hint: Any, words: str | None = None) -> Reader:
    """Returns the reader of values of a type. `words` replace its own in errors."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _ruled(args[0], args[1])
    if origin in (Union, UnionType) and not all(arg in WORDS or arg is NoneType for arg in args):
        inner = _reader(args[0], words)  # the other one is None
        return lambda value, name: None if value is None else inner(value, name)
    if origin is list:
        return _list(args[0], words)
    if origin is tuple and args[-1] is ...:
        items = _list(args[0], words)
        return lambda value, name: tuple(items(value, name))
    if origin is tuple:
        return _pair(tuple(map(_reader, args)))
    if origin is dict:
        return _dict(args, words)
    if is_dataclass(hint):
        return _nested(hint)
    return _plain(hint, words) if hint is not Any else lambda value, _name: value


def _nested(kind: Any) -> Reader:
    return lambda value, name: from_map(kind, value, name)


def _types(hint: Any) -> frozenset[type]:
    """The types whose values need no further check."""
    if get_origin(hint) in (Union, UnionType):
        return frozenset().union(*map(_types, get_args(hint)))
    if hint is float:
        return frozenset((int, float))
    return frozenset([hint]) if hint is NoneType or hint in WORDS else frozenset()


def _plain(hint: Any, words: str | None) -> Reader:
    types = _types(hint)
    words = words or " or ".join(WORDS.get(kind, "null") for kind in get_args(hint) or (hint,))

    def read(value: Any, name: str) -> Any:
        if type(value) not in types:
            raise wrong(name, words)
        return value

    return read


def _ruled(hint: Any, rule: Rule) -> Reader:
    types = _types(hint)  # only plain values have rules

    def read(value: Any, name: str) -> Any:
        if type(value) not in types or not rule.holds(value):
            raise wrong(name, rule.words)
        return value

    return read


def _list(hint: Any, words: str | None) -> Reader:
    types, item = _types(hint), _reader(hint)
    words = words or f"a list of {PLURALS.get(hint, 'values')}"

    def read(value: Any, name: str) -> list[Any]:
        if type(value) is not list and type(value) is not tuple:
            raise wrong(name, words)
        if types.issuperset(map(type, value)):
            return list(value)
        if hint in PLURALS:
            raise wrong(name, words)
        return [item(part, name) for part in value]

    return read


def _pair(items: tuple[Reader, ...]) -> Reader:
    def read(value: Any, name: str) -> tuple[Any, ...]:
        if type(value) not in (list, tuple) or len(value) != len(items):
            raise wrong(name, f"a list of {len(items)}")
        return tuple(item(part, name) for item, part in zip(items, value, strict=True))

    return read


def _dict(hint: tuple[Any, Any], words: str | None) -> Reader:
    types, readers = tuple(map(_types, hint)), tuple(map(_reader, hint))

    def read(value: Any, name: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise wrong(name, words or WORDS[dict])
        key, item = readers
        if types[0].issuperset(map(type, value)) and types[1].issuperset(map(type, value.values())):
            return value
        return {key(index, name): item(part, name) for index, part in value.items()}

    return read

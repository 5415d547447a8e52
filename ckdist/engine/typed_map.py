"""Records as maps that msgpack can encode, and back. The annotations of a record's fields are checked on the way back.

A record is a dataclass. Its fields are plain values, tuples, lists and maps of them, and records.
"""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ckdist.errors import RequestError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record", bound="DataclassInstance")
Reader = Callable[[Any, str], Any]  # (value, name of its field) -> the checked value

WORDS = {
    int: "an integer", float: "a number", str: "a string", bytes: "bytes", bool: "true or false", NoneType: "null",
    dict: "a map",
}  # fmt: skip


class Rule(NamedTuple):
    """A limit of a plain field besides its type, for Annotated. The error for a wrong value is "NAME must be WORDS"."""

    words: str
    holds: Callable[[Any], bool]


class Shape(NamedTuple):
    """The fields of one kind of record."""

    types: dict[str, frozenset[type]]  # types of the values that need no reader
    readers: dict[str, Reader]  # of all fields
    defaults: dict[str, Any]  # of all fields; MISSING for those that are always sent
    needed: tuple[str, ...]  # fields that have no default
    nested: tuple[str, ...]  # fields that hold a record, or None


def to_map(record: "DataclassInstance") -> dict[str, Any]:
    """Returns the fields of a record that differ from their defaults. Records in it become maps too."""
    shape = shape_of(type(record))
    values: dict[str, Any] = {}
    for name, default in shape.defaults.items():
        value = getattr(record, name)
        if value != default:
            values[name] = to_map(value) if name in shape.nested else value
    return values


def from_map(kind: type[Record], values: Any, name: str) -> Record:
    """Inverse of `to_map`, after msgpack. It changes `values`. `name` is the field or message that they are.

    Raises RequestError if a field is unknown or absent, or has a wrong type or size.
    """
    if type(values) is not dict:
        raise RequestError(f"{name} must be a map", name)
    types, readers, _, needed, _ = shape_of(kind)
    for key, value in values.items():
        if type(value) in types.get(key, ()):
            continue
        if key not in readers:
            known = ", ".join(sorted(readers)) or "none"
            raise RequestError(f"unknown {name} field {str(key)[:100]!r}; the known ones are {known}", name)
        values[key] = readers[key](value, key)
    for key in needed:
        if key not in values:
            values[key] = readers[key](None, key)
    return kind(**values)


def check_types(record: "DataclassInstance") -> None:
    """Raises RequestError that names the field if a plain field, list or map has a wrong type or size."""
    for name, reader in shape_of(type(record)).readers.items():
        reader(getattr(record, name), name)


@cache
def shape_of(kind: type["DataclassInstance"]) -> Shape:
    """The shape of a kind of record, from its annotations."""
    hints = get_type_hints(kind, include_extras=True)
    declared = {item.name: hints[item.name] for item in fields(kind)}
    return Shape(
        {name: _types(hint) for name, hint in declared.items()},
        {name: _reader(hint) for name, hint in declared.items()},
        {item.name: item.default for item in fields(kind)},
        tuple(item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING),
        tuple(name for name, hint in declared.items() if any(map(is_dataclass, (hint, *get_args(hint))))),
    )


def _types(hint: Any) -> frozenset[type]:
    """The types of the values that need no further check."""
    if get_origin(hint) in (Union, UnionType):
        return frozenset().union(*map(_types, get_args(hint)))
    return frozenset({float: (int, float)}.get(hint, (hint,) if hint in WORDS else ()))


def _words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, args))
    if origin is Annotated:
        return args[1].words
    if origin in (list, tuple):
        return f"a list, each item {_words(args[0])}"
    return WORDS.get(origin or hint, "valid")


def _reader(hint: Any, words: str = "") -> Reader:
    """Returns the reader of values of a type. `words` replace its own in errors."""
    origin, args, words = get_origin(hint), get_args(hint), words or _words(hint)
    if hint is Any:
        return lambda value, _name: value
    if is_dataclass(hint):
        return _nested(hint)
    if origin in (list, tuple):
        return _many(origin, _reader(args[0], words), 0 if origin is list or args[-1] is ... else len(args), words)
    if origin is dict:
        return _dict(_reader(args[0]), _reader(args[1]), words)
    if origin in (Union, UnionType) and not _types(args[0]):
        inner = _reader(args[0], words)  # the other one is None
        return lambda value, name: None if value is None else inner(value, name)
    rule = args[1] if origin is Annotated else Rule(words, lambda _: True)
    return _plain(_types(args[0] if origin is Annotated else hint), rule)


def _plain(types: frozenset[type], rule: Rule) -> Reader:
    def read(value: Any, name: str) -> Any:
        if type(value) not in types or not rule.holds(value):
            raise RequestError(f"{name} must be {rule.words}", name)
        return value

    return read


def _nested(kind: Any) -> Reader:
    return lambda value, name: from_map(kind, value, name)


def _many(make: Callable[[list[Any]], Any], item: Reader, size: int, words: str) -> Reader:
    """`size`: the number of items, 0 if there may be any number."""

    def read(value: Any, name: str) -> Any:
        if type(value) not in (list, tuple) or (size and len(value) != size):
            raise RequestError(f"{name} must be {words}", name)
        return make([item(part, name) for part in value])

    return read


def _dict(key: Reader, item: Reader, words: str) -> Reader:
    def read(value: Any, name: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise RequestError(f"{name} must be {words}", name)
        return {key(index, name): item(part, name) for index, part in value.items()}

    return read

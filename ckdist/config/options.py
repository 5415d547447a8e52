"""The declaration of a setting, for flags, TOML files and machine files: its help, type, range and flags."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast, get_args

from ckdist.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", dict: "a table"}
PREFIX = "CKDIST_"  # of variables
BYTE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def integer(text: str) -> int:
    """Parses a whole number of at most 18 digits. Raises ValueError otherwise."""
    if not re.fullmatch(r"[+-]?\d+", text, re.ASCII):
        raise ValueError("is not a whole number")
    if len(text.lstrip("+-")) > 18:
        raise ValueError("has more than 18 digits")
    return int(text)


def real(text: str) -> float:
    """Parses a finite number. Raises ValueError otherwise."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not math.isfinite(value):
        raise ValueError("is not a finite number")
    return value


def byte_size(text: str) -> int:
    """Parses `4G`, `512M`, `1.5GiB` or plain bytes. Units are powers of 1024. Raises ValueError otherwise."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT]?)(?:i?B)?", text.strip(), re.ASCII | re.IGNORECASE)
    if not match:
        raise ValueError("is not a size; write for example 4G or 512M")
    return int(float(match[1]) * BYTE_UNITS[match[2].upper()])


def integer_or_auto(text: str) -> int:
    """Parses a whole number, or `auto` as 0."""
    return 0 if text == "auto" else integer(text)


def integer_list(text: str) -> tuple[int, ...]:
    """Parses `512,1024` as (512, 1024)."""
    return tuple(integer(part.strip()) for part in text.split(","))


def proportions(text: str) -> str:
    """Parses `auto`, `even`, or positive numbers such as `3,1` or `0.7,0.3`. Returns it unchanged."""
    number = r"\s*(?![0.]+\s*(,|$))\d{1,6}(\.\d{1,6})?\s*"
    if re.fullmatch(rf"auto|even|{number}(,{number})*", text, re.ASCII):
        return text
    raise ValueError("is neither auto nor even nor a list of positive numbers such as 3,1")


def escaped(text: str) -> str:
    r"""Replaces the escapes \n, \r, \t, \", \' and \\ as C does."""
    return re.sub(r"\\([nrt\"'\\])", lambda match: {"n": "\n", "r": "\r", "t": "\t"}.get(match[1], match[1]), text)


def option(
    default: Any,
    *flags: str,
    help: str,
    kind: type | None = None,
    parse: Callable[[str], Any] | None = None,
    within: tuple[float, float] | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    repeat: bool = False,
    secret: bool = False,
    former: str | None = None,
    rest: bool = False,
    facets: Mapping[str, Any] | None = None,
) -> Any:
    """Returns a dataclass field with its declaration. A bool field is a switch.

    Args:
        default: The default; dict for an empty one; dataclasses.MISSING for a required setting.
        flags: The last one is the long form. Without a long form, `Settings` adds the field's name. A name without
            dashes is a positional argument.
        kind: The type of the value, or of an element, if neither the default nor a field of `Settings` shows it.
        parse: Reads the value of a flag. Chosen by the type if None.
        within: Least and greatest allowed value (or element of a list).
        metavar: Name of the value in the help. Default for whole numbers: N.
        repeat: Collect every use of the flag in a tuple.
        secret: Leave the value out of the configuration's repr.
        former: The flag's name in the last release. It is accepted, and not shown in the help.
        rest: A positional argument that takes the first word that is not a flag and all words after it.
        facets: Further metadata.
    """
    shown: Any = kind or (dict if default is dict else type(default))
    shown = str if shown in (tuple, type(None)) else shown
    low, high = within or (None, None)
    metadata = {
        "flags": flags,
        "help": help,
        **_reading(shown, parse, metavar),
        "low": low,
        "high": high,
        "choices": choices,
        "repeat": repeat,
        "former": former,
        "rest": rest,
        **(facets or {}),
    }
    if default is dict:
        return field(default_factory=dict[str, Any], metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


def _reading(kind: type, parse: Callable[[str], Any] | None, metavar: str | None) -> dict[str, Any]:
    parse = parse or {int: integer, float: real}.get(kind, str)
    return {"kind": kind, "parse": parse, "metavar": metavar or ("N" if kind is int else None)}


def _element_type(annotation: Any) -> Any:
    """Returns the type in `int | None`, or in `tuple[int, ...]`."""
    parts = get_args(annotation)
    return _element_type(parts[0]) if parts else annotation


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A configuration whose fields are made by `option`. They are checked and converted when it is made."""

    def __init_subclass__(cls, has_flags: bool = True) -> None:
        """Completes the declarations of the fields: the flag by the name, the type by the annotation."""
        for name, annotation in cls.__annotations__.items():
            item, kind = cls.__dict__.get(name), _element_type(annotation)
            if not isinstance(item, Field):
                continue
            declared: dict[str, Any] = dict(item.metadata)
            if has_flags and all(re.match("-[^-]", flag) for flag in declared["flags"]):
                declared["flags"] = (*declared["flags"], f"--{name.replace('_', '-')}")
            if kind in (int, float) and declared["kind"] is str:
                parse = None if declared["parse"] is str else declared["parse"]
                declared |= _reading(kind, parse, declared["metavar"])
            item.metadata = MappingProxyType(declared)

    def __post_init__(self) -> None:
        for item in fields(self):
            name = item.metadata["flags"][-1] if item.metadata["flags"] else item.name
            object.__setattr__(self, item.name, checked(item, getattr(self, item.name), name))


@dataclass(frozen=True, kw_only=True)
class CommandSettings(Settings):
    """The settings of every command."""

    verbose: bool = option(False, "-v", help="log more")


def changed(kind: type, name: str, **changes: Any) -> Any:
    """Returns the field `name` of the dataclass `kind` with another default or other metadata."""
    (item,) = (item for item in fields(kind) if item.name == name)
    return field(default=changes.pop("default", item.default), repr=item.repr, metadata={**item.metadata, **changes})


def present_names(config_class: type["DataclassInstance"], settings: dict[str, Any]) -> dict[str, Any]:
    """Renames former names of fields in `settings` to their present names."""
    former = {
        item.metadata["former"].lstrip("-").replace("-", "_"): item.name
        for item in fields(config_class)
        if item.metadata.get("former")
    }
    return {former.get(name, name): value for name, value in settings.items()}


def checked(item: Field[Any], value: Any, name: str) -> Any:
    """Returns `value` in the type of `item`, a field made by `option`: a list as a tuple, a whole number as a float.

    Raises ConfigError, which begins with `name`, if it has another type, or is outside the choices or the range.
    """
    if value is None and item.default is None:
        return None
    is_list = isinstance(value, (tuple, list))
    takes_list = item.metadata["repeat"] or "tuple" in str(item.type)
    if not takes_list or not (is_list or isinstance(item.default, tuple)):
        return checked_value(item.metadata, value, name)
    parts = cast("Sequence[Any]", value if is_list else (value,))
    return tuple(checked_value(item.metadata, part, name) for part in parts)


def checked_value(limits: Mapping[str, Any], value: Any, name: str) -> Any:
    """Does the work of `checked` for one value. `limits` has its kind, low, high and choices, as a field's metadata."""
    kind, low, high, choices = limits["kind"], limits["low"], limits["high"], limits.get("choices")
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(cast("os.PathLike[str]", value))
    elif kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} ({_short(value)}) must be {KINDS[kind]}")
    if choices is not None and value not in choices:
        raise ConfigError(
            f"{name} ({_short(value)[1:-1]}) must be {'one of ' * (len(choices) > 1)}{', '.join(choices)}"
        )
    if low is not None and not low <= value <= high:
        raise ConfigError(f"{name} ({_short(value)}) must be from {low} to {high}")
    return float(value) if kind is float else value


def _short(value: Any) -> str:
    """The value on one line of a message."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        text = "a huge number"
    return text if len(text) <= 80 else f"{text[:78]}…{text[-1]}"

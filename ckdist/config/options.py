"""The options of a command: flags, help, parser and range of each field. This module knows no command."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from typing import TYPE_CHECKING, Any, cast

from ckdist.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BYTE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def integer(text: str) -> int:
    """Parses a whole number of at most 18 digits. Raises ValueError otherwise."""
    if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        raise ValueError("is not a whole number")
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


def escaped(text: str) -> str:
    r"""Replaces the escapes \n, \r, \t, \", \' and \\ as C does."""
    return re.sub(r"\\([nrt\"'\\])", lambda match: {"n": "\n", "r": "\r", "t": "\t"}.get(match[1], match[1]), text)


def option(
    default: Any,
    *flags: str,
    help: str,
    kind: type | None = None,
    parse: Callable[[str], Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    repeat: bool = False,
    secret: bool = False,
    former: str | None = None,
    rest: bool = False,
) -> Any:
    """Returns a dataclass field with its flags. A bool field is a switch.

    Args:
        flags: The last one is the long form. A name without dashes is a positional argument.
        kind: The type of the value, or of an element, if the default does not show it.
        parse: Reads the value of a flag. Chosen by the type if None.
        low: Least allowed value (or element of a list).
        high: Greatest allowed value.
        repeat: Collect every use of the flag in a tuple.
        secret: Leave the value out of the configuration's repr.
        former: The flag's name in the last release. It is accepted, and not shown in the help.
        rest: A positional argument that takes the first word that is not a flag and all words after it.
    """
    kind = kind or (str if type(default) in (tuple, type(None)) else type(default))
    metadata = {
        "flags": flags,
        "help": help,
        "kind": kind,
        "parse": parse or {int: integer, float: real}.get(kind, str),
        "low": low,
        "high": high,
        "choices": choices,
        "metavar": metavar,
        "repeat": repeat,
        "former": former,
        "rest": rest,
    }
    return field(default=default, repr=not secret, metadata=metadata)


def present_names(config_class: type["DataclassInstance"], settings: dict[str, Any]) -> dict[str, Any]:
    """Renames former names of fields in `settings` to their present names."""
    former = {
        item.metadata["former"].lstrip("-").replace("-", "_"): item.name
        for item in fields(config_class)
        if item.metadata.get("former")
    }
    return {former.get(name, name): value for name, value in settings.items()}


def check_field(item: Field[Any], value: Any) -> None:
    """Raises ConfigError if `value` is outside the choices or the range of `item`, a field made by `option`."""
    limits = item.metadata
    name = limits["flags"][-1]
    if value is None and item.default is None:
        return
    parts = cast("Sequence[Any]", value if isinstance(value, (tuple, list)) else (value,))
    choices, low, high = limits["choices"], limits["low"], limits["high"]
    for part in parts:
        if choices is not None and part not in choices:
            raise ConfigError(f"{name} ({part}) must be one of {', '.join(choices)}")
        if low is None and high is None:
            continue
        if isinstance(part, bool) or not isinstance(part, (int, float)):
            raise ConfigError(f"{name} ({part!r}) must be a number")
        if not ((low is None or low <= part) and (high is None or part <= high)):
            raise ConfigError(f"{name} ({part}) must be from {low} to {high}")

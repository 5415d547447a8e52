"""One option of a command: its flags, help, how its text is read and what is allowed. It names no command."""

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
    """A whole number of at most 18 digits. ValueError for all else."""
    if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        raise ValueError("is not a whole number")
    return int(text)


def real(text: str) -> float:
    """A finite number. ValueError for all else."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if not math.isfinite(value):
        raise ValueError("is not a finite number")
    return value


def byte_size(text: str) -> int:
    """`4G`, `512M`, `1.5GiB` or plain bytes; units are powers of 1024."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT]?)(?:i?B)?", text.strip(), re.ASCII | re.IGNORECASE)
    if not match:
        raise ValueError("is not a size; write for example 4G or 512M")
    return int(float(match[1]) * BYTE_UNITS[match[2].upper()])


def integer_or_auto(text: str) -> int:
    """A whole number, or `auto`, which is 0."""
    return 0 if text == "auto" else integer(text)


def integer_list(text: str) -> tuple[int, ...]:
    """`512,1024` as (512, 1024)."""
    return tuple(integer(part.strip()) for part in text.split(","))


def escaped(text: str) -> str:
    r"""`text` with \n, \r, \t, \", \' and \\ read as in C."""
    return re.sub(r"\\([nrt\"'\\])", lambda match: {"n": "\n", "r": "\r", "t": "\t"}.get(match[1], match[1]), text)


def option(
    default: Any,
    *flags: str,
    help: str,
    parse: Callable[[str], Any] = str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    repeat: bool = False,
    secret: bool = False,
    former: str | None = None,
    rest: bool = False,
) -> Any:
    """A dataclass field with its flags, the last of them the long one; a name without dashes is a positional argument.

    `low` and `high` bound the value (or each of a list) and are allowed themselves. A bool field is a switch. `repeat`
    collects every use of the flag in a tuple. A `secret` does not appear in the configuration's repr. `former`: the
    flag's name in the last release, which is still understood and not shown. `rest`: a positional argument that takes
    the first word that is no flag and all that follow, as they are.
    """
    metadata = {
        "flags": flags,
        "help": help,
        "parse": parse,
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
    """`settings` with fields under their present names; what is no former name stays as it is."""
    former = {
        item.metadata["former"].lstrip("-").replace("-", "_"): item.name
        for item in fields(config_class)
        if item.metadata.get("former")
    }
    return {former.get(name, name): value for name, value in settings.items()}


def check_field(item: Field[Any], value: Any) -> None:
    """ConfigError when `value` is outside of what `item` (a dataclass field made by `option`) allows."""
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

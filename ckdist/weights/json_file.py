"""Reads untrusted JSON: bounded size and number of items, no duplicate keys, errors of one line."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from ckdist.errors import ModelFileError
from ckdist.regular_file import read_regular

MAX_BYTES = 64 << 20
MAX_ITEMS = 1 << 22  # counted as commas; bounds the memory of the parsed value
_MAX_DIGITS = 30


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises ModelFileError if it is not one, or is larger than MAX_BYTES."""
    path = pathlib.Path(path)
    try:
        data = read_regular(path, MAX_BYTES)
    except OSError as e:
        raise ModelFileError(f"{path} cannot be read: {e.strerror or e}") from None
    return parse_json_object(data, str(path))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parses a JSON object. Raises ModelFileError, which begins with `where`, if `data` is not one."""
    items = data.count(b",")
    if items > MAX_ITEMS:
        raise ModelFileError(f"{where} has {items} items, more than the {MAX_ITEMS} allowed")
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError:
        raise ModelFileError(f"{where} is not JSON that can be read: it is nested too deep") from None
    except ValueError as e:  # JSONDecodeError and UnicodeDecodeError are among these
        raise ModelFileError(f"{where} is not JSON: {str(e)[:200]}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where} is not a JSON object but {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice!r} stands there twice")
    return result


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, more than the {_MAX_DIGITS} allowed")
    return int(digits)


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config of config.json, or of its text_config; None if there is none."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("quantization_config"), dict):
            return part["quantization_config"]
    return None

"""A key file: TOML with one table `[[key]]` per key, or plain text with one key per line."""

import pathlib
import re
import stat
import sys
from dataclasses import fields
from typing import Any

from ckdist.errors import ConfigError
from ckdist.serve.api_keys import ApiKey, KeyLimits
from ckdist.text_file import read_text_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_KEYS = 1000
MAX_KEY_FILE_BYTES = 1 << 18
MAX_LIMIT = 1 << 31
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
KEY = re.compile(r"[^\s\x00-\x1f\x7f]{1,4096}")
TABLE = re.compile(r"^\s*\[", re.MULTILINE)


def read_keys(path: str) -> tuple[ApiKey, ...]:
    """Reads the keys in a file.

    Raises ConfigError if users other than its owner can read it, if it holds no key, or if a key is malformed.
    """
    where = f"--api-key-file {path}"
    try:
        mode = pathlib.Path(path).stat().st_mode
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {where}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode):
        raise ConfigError(f"cannot read {where}: it is not a regular file")
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{where} can be read by others (mode {stat.S_IMODE(mode):o}): chmod 600 {path}")
    text = read_text_file(path, where, MAX_KEY_FILE_BYTES)
    if TABLE.search(text):
        keys = _keys_of_tables(text, where)
    else:
        keys = tuple(ApiKey.without_name(line.strip()) for line in text.splitlines() if line.strip())
    if not keys:
        raise ConfigError(f"{where} holds no key; write one per line, or tables [[key]] with name and key")
    return checked_keys(keys, where)


def checked_keys(keys: tuple[ApiKey, ...], where: str) -> tuple[ApiKey, ...]:
    """Returns `keys` without duplicates.

    Raises ConfigError for too many or malformed keys, for a key with two names, and for a name with different limits.
    """
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"{where}: {len(keys)} API keys were given; at most {MAX_KEYS} are allowed")
    by_key, limits = dict[str, ApiKey](), dict[str, KeyLimits]()
    for number, item in enumerate(keys, 1):
        if not KEY.fullmatch(item.key):
            raise ConfigError(f"{where}: key {number} must have 1 to 4096 characters, and no spaces")
        if by_key.setdefault(item.key, item).name != item.name:
            raise ConfigError(f"{where}: {item.name!r} and {by_key[item.key].name!r} have the same key; change one")
        if limits.setdefault(item.name, item.limits) != item.limits:
            raise ConfigError(f"{where}: the keys of {item.name!r} have different limits; give all of them the same")
    return tuple(by_key.values())


def _keys_of_tables(text: str, where: str) -> tuple[ApiKey, ...]:
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not TOML: {' '.join(str(error).split())[:200]}") from None
    tables = found.pop("key", [])
    if found or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        unknown = next(iter(found), "key")
        raise ConfigError(f"{where}: {unknown[:40]!r} is not known; write one table [[key]] for each key")
    return tuple(_key_of_table(table, f"{where}: key {number}") for number, table in enumerate(tables, 1))


def _key_of_table(table: dict[str, Any], where: str) -> ApiKey:
    known = [item.name for item in fields(KeyLimits)]
    for name in table:
        if name not in ("name", "key", *known):
            raise ConfigError(f"{where}: {name[:40]!r} is not known; known are name, key, {', '.join(known)}")
    name, key = table.get("name"), table.get("key")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{where} needs a name of 1 to 64 letters, digits, or any of _ . @ -")
    if not isinstance(key, str):
        raise ConfigError(f"{where} ({name}) needs a key, which is a string")
    limits = {item: table[item] for item in known if item in table}
    if type(limits.get("models", True)) is not bool:
        raise ConfigError(f"{where} ({name}): models must be true or false, not {str(limits['models'])[:40]}")
    for item, value in limits.items():
        if item == "models":
            continue
        low = 0 if item == "max_waiting" else 1
        if type(value) is not int or not low <= value <= MAX_LIMIT:
            raise ConfigError(f"{where} ({name}): {item} must be a whole number from {low}, not {str(value)[:40]}")
    if "max_waiting" in limits and "max_running" not in limits:
        raise ConfigError(f"{where} ({name}): max_waiting needs max_running")
    return ApiKey(name, key, KeyLimits(**limits))

"""Settings without a flag: variables like CKDIST_CTX_SIZE, and the TOML file of --config.

A flag wins over a variable, and a variable over the file.
"""

import difflib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

from ckdist.config.options import PREFIX, checked
from ckdist.errors import ConfigError, did_you_mean, one_line
from ckdist.text_file import read_text_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_FILE_BYTES = 1 << 20
# Variables that are read elsewhere: CKDIST_API_KEY is a secret, and CKDIST_MODELS the folder of fetched models.
READ_ELSEWHERE = ("CKDIST_API_KEY", "CKDIST_ISA", "CKDIST_MODELS")
WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def misspelt_variables(config_class: type["DataclassInstance"], environment: Mapping[str, str]) -> list[str]:
    """Returns a line for each variable that nothing reads and whose name is almost that of a flag."""
    known = setting_variables(config_class)
    lines: list[str] = []
    for name in environment:
        if name.startswith(PREFIX) and name not in known and name not in READ_ELSEWHERE:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            lines += [f"{name} is not read; did you mean {nearest}?" for nearest in close]
    return lines


def from_table(config_class: type["DataclassInstance"], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Reads the settings in a TOML table whose keys are flags without dashes, such as `ctx_size` or `ctx-size`.

    Returns the values by field. Raises ConfigError, which begins with `where`, if a key or a value is wrong.
    """
    known = {name: item for item in fields(config_class) for name in _names(item)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        item = known.get(key.replace("-", "_"))
        if item is None:
            raise ConfigError(f"{where} has an unknown setting {key!r:.60}{did_you_mean(key, known)}")
        if not item.repr:
            raise ConfigError(f"{where}: {key} is a secret, and others may read the file: use {item.name}_file")
        if item.name in values:
            raise ConfigError(f"{where} gives {item.name} twice: leave {key!r:.60} out")
        values[item.name] = _parsed(item, value, f"{where}: {key}")
    return values


def read_toml(path: str) -> dict[str, Any]:
    """Reads a TOML file. Raises ConfigError if it is unreadable."""
    if sys.version_info >= (3, 11):  # here: most starts have no file
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(read_text_file(path, path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:  # Python reads no int of more than 4300 digits
        raise ConfigError(f"{path} is not TOML: {one_line(error)}") from None


def layered(config_class: type["DataclassInstance"], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the values of variables and of the file to those of the given `flags`. All are by field.

    An empty variable counts as absent. Raises ConfigError if a value is wrong, or the file cannot be read.
    """
    items = setting_variables(config_class).items()
    values = {item.name: _parsed(item, os.environ[name], name) for name, item in items if os.environ.get(name)}
    values |= flags
    path = values.get("config")
    return values if path is None else from_table(config_class, read_toml(path), path) | values


def setting_variables(config_class: type["DataclassInstance"]) -> dict[str, Field[Any]]:
    """Returns the settings of a command by the variables that give them: CKDIST_CTX_SIZE gives `--ctx-size`."""
    flags = {item.metadata["flags"][-1]: item for item in fields(config_class)}
    named = {PREFIX + flag[2:].replace("-", "_").upper(): item for flag, item in flags.items() if flag[:1] == "-"}
    return {name: item for name, item in named.items() if name not in READ_ELSEWHERE}


def environment_without(config_class: type["DataclassInstance"]) -> dict[str, str]:
    """Returns this process's variables for a child whose flags have the values of a command's settings."""
    given = setting_variables(config_class)
    return {name: value for name, value in os.environ.items() if name not in given}


def _names(item: Field[Any]) -> list[str]:
    """Returns the keys of a setting in a file. A positional argument and `config` have none."""
    flags = [flag for flag in item.metadata["flags"] if flag.startswith("--")]
    return [] if item.name == "config" else [item.name] * bool(flags) + [flag[2:].replace("-", "_") for flag in flags]


def _parsed(item: Field[Any], value: Any, name: str) -> Any:
    """Returns a value in the type of its setting. A text is parsed as a flag's value is."""
    meta = item.metadata
    if isinstance(value, dict) and meta["kind"] is str:
        value = json.dumps(value)  # --chat-template-kwargs as a table
    if isinstance(value, str):
        try:
            if meta["kind"] is bool:
                value = WORDS[value.lower()]
            elif meta["repeat"]:
                value = tuple(meta["parse"](part.strip()) for part in value.split(","))
            else:
                value = meta["parse"](value)
        except KeyError:
            raise ConfigError(f"{name} ({value!r:.60}) must be true or false") from None
        except ValueError as error:
            raise ConfigError(f"{name}: {value!r:.60} {error}") from None
    return checked(item, [value] if meta["repeat"] and not isinstance(value, (list, tuple)) else value, name)

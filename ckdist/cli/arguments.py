"""Builds argparse parsers from configuration classes, and configurations from command lines.

argparse converts the values and prints the help. `_pair` joins each flag with its value before that. So no flag is
guessed from a prefix, and a value may begin with a dash.
"""

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import PREFIX
from ckdist.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")


class CommandParser(argparse.ArgumentParser):
    """An argparse parser that raises a one-line ConfigError in place of printing and exiting.

    Attributes:
        arguments: All arguments in the order of their definition.
        flags: Maps each spelling of a flag, former spellings included, to its argument.
        rest: The argument that takes all words from the first one that is not a flag, or None.
    """

    def __init__(self, **settings: Any) -> None:
        self.arguments: list[argparse.Action] = []
        self.flags: dict[str, argparse.Action] = {}
        self.rest: argparse.Action | None = None
        self.after: dict[str, str] = {}  # a long flag: the flag that its second and later uses are
        super().__init__(**settings)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """Adds an argument as argparse does, and records it."""
        action = super().add_argument(*names, **settings)
        self.arguments.append(action)
        self.flags |= dict.fromkeys(action.option_strings, action)
        return action

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


@functools.cache
def parser_for(config_class: type, prog: str) -> CommandParser:
    """Builds the parser of one command. Its description is the first line of the class's docstring."""
    description = (config_class.__doc__ or "").strip().splitlines()[0]
    parser = CommandParser(prog=prog, description=description, allow_abbrev=False)
    for item in fields(config_class):
        meta = item.metadata
        if isinstance(item.default, bool):
            parser.add_argument(
                *meta["flags"], dest=item.name, action="store_true", default=argparse.SUPPRESS, help=meta["help"]
            )
            continue
        settings: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "type": _reader(meta["parse"]),
            "metavar": meta["metavar"],
            "help": _help(item),
        }
        if meta["choices"]:
            settings["choices"] = meta["choices"]
        if meta["repeat"]:
            settings["action"] = "append"
        if meta["rest"]:
            parser.rest = parser.add_argument(meta["flags"][0], nargs="...", **{**settings, "default": []})
        elif meta["flags"][0].startswith("-"):
            action = parser.add_argument(*meta["flags"], dest=item.name, **settings)
            if meta["former"]:
                parser.flags[meta["former"]] = action
        elif meta["repeat"]:
            del settings["action"]
            parser.add_argument(meta["flags"][0], nargs="*", **{**settings, "default": item.default})
        else:
            parser.add_argument(meta["flags"][0], nargs="?", **{**settings, "default": item.default})
        if first := meta.get("after"):
            parser.after[first] = meta["flags"][-1]
    return parser


def parse_arguments(config_class: type[Config], arguments: Sequence[str], prog: str) -> Config:
    """Parses `arguments` into a configuration. `--help` prints the help and exits with 0.

    Raises:
        ConfigError: A flag is unknown (the message names the nearest one), lacks its value, or is out of range. So is a
            variable or a key of the file, in a command that runs a model.
    """
    parser = parser_for(config_class, prog)
    try:
        paired, rest = _pair(parser, arguments)
        paired.sort(key=lambda word: not word.startswith("-") or word == "-")  # flags first: arguments may be repeated
        values = vars(parser.parse_args(paired))
        for item in fields(config_class):
            if item.metadata["repeat"] and item.name in values:
                values[item.name] = tuple(values[item.name])
            if item.metadata["rest"]:
                values[item.name] = tuple(rest)
        if issubclass(config_class, EngineConfig) and ("config" in values or is_in_environment()):
            from ckdist.config.given_elsewhere import layered

            values = layered(config_class, values)
        return config_class(**values)
    except ConfigError as error:
        raise ConfigError(escaped(str(error))) from None


def is_in_environment() -> bool:
    """Returns True if a variable may be a setting."""
    return any(name.startswith(PREFIX) for name in os.environ)


def _pair(parser: CommandParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Normalizes flags: `-c 4096` becomes `--ctx-size=4096`.

    Returns:
        The normalized words, and the words that `parser.rest` takes.
    """
    actions = parser.flags
    words, paired = list(arguments), []
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if parser.rest is not None and (word == "--" or not word.startswith("-")):
            return paired, words if word == "--" else [word, *words]
        if not word.startswith("-") or word == "-":
            paired.append(word)
            continue
        if flag not in actions:
            raise ConfigError(f"unknown flag {flag}{did_you_mean(flag, actions, 0.5)}; see {parser.prog} --help")
        action = actions[flag]
        if action.nargs == 0:
            if equals:
                raise ConfigError(f"{flag} takes no value, but got '{value}'")
            paired.append(flag)
            continue
        if not equals:
            if not words or words[0] in actions:
                raise ConfigError(f"{flag} needs a value; see {parser.prog} --help")
            value = words.pop(0)
        name = action.option_strings[-1]
        if name in parser.after and any(known.startswith(f"{name}=") for known in paired):
            name = parser.after[name]
        paired.append(f"{name}={value}")
    return paired, []


def escaped(text: str) -> str:
    """Escapes characters that cannot be printed, such as line ends and control characters of a hostile argument."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _reader(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        """Parses a flag's value. A ValueError becomes argparse's ArgumentTypeError."""
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"'{text}' {error}") from None

    return read


def _help(item: Field[Any]) -> str:
    text = item.metadata["help"].replace("%", "%%")
    if item.default in (None, "", ()) or "default" in text:
        return text
    default: Any = item.default
    if isinstance(default, tuple):
        default = ",".join(str(part) for part in default)
    elif item.metadata["parse"].__name__ == "byte_size":
        default = f"{default >> 20}M"
    return f"{text} (default: {default})"

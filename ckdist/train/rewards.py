"""The rewards of GRPO: a comparison with the record's answer, or a function of the user's Python file.

A record never names a function or a pattern: only the configuration does.
"""

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

from ckdist.errors import ConfigError

# reward(prompt, answer, expected) -> a number; all three are texts. `expected` is the record's own answer.
Reward: TypeAlias = Callable[[str, str, str], float]
PATTERN = "regex:"


def open_reward(text: str) -> Reward:
    """The function that `reward` names. Raises ConfigError if there is none."""
    if text == "exact":
        return lambda prompt, answer, expected: float(answer.strip() == expected.strip())  # noqa: ARG005
    if text.startswith(PATTERN):
        return _matching(text.removeprefix(PATTERN))
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ConfigError(f"reward ({text:.80}) must be exact, regex:PATTERN or FILE.py:FUNCTION")
    return _checked(_function(Path(file), name), text)


def _matching(pattern: str) -> Reward:
    """1 if the last matches in the answer and in the record's answer are equal: their first group, or all of them."""
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"reward (regex:{pattern:.60}) is no regular expression: {error}") from None

    def last(text: str) -> str | None:
        found = list(compiled.finditer(text))
        return found[-1].group(1 if compiled.groups else 0) if found else None

    def reward(prompt: str, answer: str, expected: str) -> float:  # noqa: ARG001
        """1.0 if the matches are equal, else 0.0."""
        return float(last(answer) is not None and last(answer) == last(expected))

    return reward


def _function(file: Path, name: str) -> Reward:
    spec = importlib.util.spec_from_file_location("ckdist_reward", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"reward: there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"reward: {file} cannot be run: {type(error).__name__}: {error}") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"reward: {file} has no function {name}")
    return cast("Reward", found)


def _checked(function: Reward, text: str) -> Reward:
    def reward(prompt: str, answer: str, expected: str) -> float:
        """The user's number. Raises ConfigError if the function fails or returns none."""
        try:
            value = float(function(prompt, answer, expected))
        except Exception as error:
            raise ConfigError(f"reward ({text}) failed: {type(error).__name__}: {error}") from None
        if not math.isfinite(value):
            raise ConfigError(
                f"reward ({text}) returned {value} for the answer {answer[:60]!r}: return a finite number"
            )
        return value

    return reward

"""Parses a request's body as JSON, with limits.

It refuses nesting that is too deep, NaN and Infinity, numbers with too many digits, and lone surrogates in texts. It
does not interpret the fields.
"""

import json
from typing import Any, NoReturn

from ckdist.serve.problems import Problem
from ckdist.tokens.chat_input import kind_of

MAX_DEPTH = 64
MAX_DIGITS = 40


def parse_object(data: bytes) -> dict[str, Any]:
    """Parses JSON bytes to a dict. Raises Problem 400 for the faults above."""
    value = _parse(data)
    if not isinstance(value, dict):
        raise Problem(400, f"the body must be a JSON object, not {kind_of(value)}")
    return value


def parse_list(data: bytes) -> list[Any]:
    """Parses JSON bytes to a list. Raises Problem 400 for the faults above."""
    value = _parse(data)
    if not isinstance(value, list):
        raise Problem(400, f"the body must be a JSON list, not {kind_of(value)}")
    return value


def _parse(data: bytes) -> Any:
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_int=_bounded_int)
    except UnicodeDecodeError:
        raise Problem(400, "the body is not UTF-8") from None
    except RecursionError:
        raise Problem(400, f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise Problem(400, f"the body is not JSON: {error}") from None
    if isinstance(value, (dict, list)):
        _check(value, may_hold_surrogates=b"\\u" in data)
    return value


def _check(value: dict[str, Any] | list[Any], may_hold_surrogates: bool) -> None:
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise Problem(400, f"the body is nested deeper than {MAX_DEPTH} levels")
        deeper = []
        for item in level:
            for part in (*item, *item.values()) if isinstance(item, dict) else item:
                if isinstance(part, (dict, list)):
                    deeper.append(part)
                elif may_hold_surrogates and isinstance(part, str):
                    _check_text(part)
        level = deeper


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Problem(400, "the body has half a surrogate pair in a string; send whole characters") from None


def _bounded_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")

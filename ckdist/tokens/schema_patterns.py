"""Rewrites the patterns of a JSON Schema so that llguidance follows them exactly."""

import re
from typing import Any

MAX_DEPTH = 200  # deeper parts stay as they are, and llguidance refuses them
DATA = ("const", "enum", "default", "examples", "not")  # hold no patterns that an answer follows
_NEGATED = re.compile(r"\\.|\[\^(?![\]-])", re.DOTALL)


def with_exact_patterns(schema: Any, depth: int = 0) -> Any:
    r"""A copy of the schema in which classes like [^"\\] exclude the character 0 too.

    llguidance 1.9 lets the escapes \" and \\ match any class with all control characters, even if it lacks the
    quotation mark and the backslash. It reads a class exactly if that lacks a control character.
    """
    if depth > MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [with_exact_patterns(part, depth + 1) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            found[key] = _exact(value)
        elif key == "patternProperties" and isinstance(value, dict):
            found[key] = {_exact(name): with_exact_patterns(part, depth + 2) for name, part in value.items()}
        else:
            found[key] = value if key in DATA else with_exact_patterns(value, depth + 1)
    return found


def _exact(pattern: str) -> str:
    return _NEGATED.sub(lambda match: r"[^\x00" if match[0] == "[^" else match[0], pattern)

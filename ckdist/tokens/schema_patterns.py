"""Patterns of a JSON Schema, made such that llguidance follows them to the letter."""

import re
from typing import Any

MAX_DEPTH = 200  # what is nested deeper stays as it is, and llguidance refuses it
DATA = ("const", "enum", "default", "examples", "not")  # hold no patterns that an answer follows
_NEGATED = re.compile(r"\\.|\[\^(?![\]-])", re.DOTALL)


def with_exact_patterns(schema: Any, depth: int = 0) -> Any:
    r"""A copy of the schema in which classes as [^"\\] exclude the character 0 too.

    llguidance 1.9 lets \" and \\ stand for any class that has all control characters, whether it has a quotation mark
    and a backslash or not; one that lacks a control character it reads exactly.
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

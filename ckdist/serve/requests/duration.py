"""Ollama's durations: seconds as a number, or a text such as `5m` or `1h30m`. A negative one has no end."""

import math
import re
from typing import Any

from ckdist.serve.problems import Problem

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h|)", re.ASCII)


def read_keep_alive(value: Any) -> float | None:
    """Returns the seconds of `keep_alive`; None: for ever. Raises Problem 400 if it is no duration."""
    text = str(value) if type(value) in (int, float) else value
    if isinstance(text, str) and re.fullmatch(rf"-?(?:{PART.pattern})+", text, re.ASCII):
        if text.startswith("-"):
            return None
        seconds = math.fsum(float(number) * UNITS[unit] for number, unit in PART.findall(text))
        if seconds < 1e9:
            return seconds
    raise Problem(400, f"keep_alive ({str(value)!r:.40}) must be seconds, or a text such as '5m' or '-1'", "keep_alive")

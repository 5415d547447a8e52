"""Stores measured rates of a rank in the user's cache, for its next starts."""

import contextlib
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Sequence

from ckdist.comm.thresholds import cache_folder


def kept_rates(key: str, count: int) -> list[float] | None:
    """The rates stored under `key`; None if there are none, or the file is invalid."""
    try:
        found = json.loads(_path(key).read_text(encoding="utf-8"))
        rates = [float(rate) for rate in found["rates"]]
    except (OSError, ValueError, TypeError, KeyError, RuntimeError):
        return None
    makes_sense = found["key"] == key and len(rates) == count and all(0 < rate < math.inf for rate in rates)
    return rates if makes_sense else None


def keep_rates(key: str, rates: Sequence[float]) -> None:
    """Stores the rates. A cache that cannot be written is ignored."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"key": key, "rates": list(rates)}), encoding="utf-8")
        temporary.replace(path)


def _path(key: str) -> pathlib.Path:
    """The file of a key. Raises RuntimeError if the user has no home folder."""
    return cache_folder() / "rates" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
